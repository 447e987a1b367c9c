"""Open the XLA devices of a job, and list the devices of this machine."""

from __future__ import annotations

import os
from importlib.metadata import version

import torch_xla
import torch_xla.runtime as xr
from torch_xla._internal import tpu
from torch_xla.core import xla_model as xm
from torch_xla.debug import metrics

from configs.errors import Refused
from configs.settings.train import Train
from runtimes.contract import Probe
from runtimes.detect_hardware import peak_rss
from runtimes.process.compile_cache import CompileCache
from runtimes.registry import check_supported
from runtimes.spmd.tpu_sharding import peak_of
from runtimes.xla.mesh import replace_operators


def check(settings: Train) -> None:
    """Raise Refused for train settings that this runtime or this machine does not support."""
    _count_chips(settings.device)
    check_supported("xla", settings)


def start(name: str, compiled: str | None) -> CompileCache:
    """Open device `auto`, `tpu` or `cpu`, enable SPMD over all of its chips, replace operators.

    Args:
        name: name of the device.
        compiled: URL of the folder of compiled programs; None disables the cache.

    Raises:
        Refused: the device is absent, or this process has opened another device.
    """
    wanted = "CPU" if name == "cpu" or not _count_chips(name) else "TPU"
    if os.environ.setdefault("PJRT_DEVICE", wanted) != wanted and name != "auto":
        raise Refused(f"device {name}: PJRT_DEVICE is {os.environ['PJRT_DEVICE']}")
    kept = CompileCache(compiled, f"xla-{version('torch_xla')}")
    if kept.path is not None and not torch_xla._XLAC._xla_computation_cache_is_initialized():
        xr.initialize_cache(str(kept.path), readonly=False)
    xr.use_spmd()
    replace_operators()
    return kept


def _count_chips(name: str) -> int:
    """Number of TPU chips of this machine. Raises Refused if the named device is absent."""
    chips = tpu.num_available_chips()
    if name not in ("auto", "cpu", "tpu"):
        raise Refused(f"device {name!r} is not for runtime xla (auto, tpu or cpu)")
    if name == "tpu" and not chips:
        raise Refused("device tpu: this machine has none; set auto or cpu")
    return chips


def describe() -> str:
    """Name of the open devices for messages, such as `tpu v5p (8 devices)`."""
    kind = str(xr.device_type()).lower()
    if kind == "tpu":
        kind = f"tpu {tpu.get_tpu_type()}"
    return f"{kind} ({xr.global_runtime_device_count()} devices)"


def peak_flops(compute_dtype: str) -> float | None:
    """Peak FLOP/s of one device at a compute dtype; None if it is unknown."""
    if xr.device_type() != "TPU" or compute_dtype != "bfloat16":
        return None
    return peak_of(tpu.get_tpu_type())


def memory_bytes() -> int:
    """Peak bytes used on a device so far, or by this process where the device reports none."""
    if xr.device_type() != "TPU":
        return peak_rss()
    try:
        info = xm.get_memory_info()
    except RuntimeError:  # PyTorch/XLA 2.9 reports no memory info in SPMD mode
        return peak_rss()
    return int(info.get("peak_bytes_used", info["bytes_used"]))


def compile_seconds() -> float:
    """Seconds of XLA compilation in this process so far."""
    metric = metrics.metric_data("CompileTime")  # (times, sum in ns, samples)
    return 0.0 if metric is None else metric[1] / 1e9


def versions() -> dict[str, str]:
    """Versions of the packages that affect numerical results."""
    return {name: version(name) for name in ("torch", "torch_xla", "diffusers", "numpy")}


def probe() -> Probe:
    """Devices and versions of this machine; no device is opened."""
    chips = tpu.num_available_chips()
    devices = [f"tpu ({chips} chips)"] if chips else []
    return Probe(True, [*devices, "cpu (XLA)"], versions())
