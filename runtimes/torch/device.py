"""Select a job's device, and list the devices of this machine."""

from __future__ import annotations

import gc
import logging
import os
import platform
import re
import sys
from importlib.metadata import version
from importlib.util import find_spec

import torch

from configs.errors import Refused
from configs.settings.train import Train
from configs.settings.train_parts import Hpu
from runtimes import detect_hardware
from runtimes.contract import Probe
from runtimes.detect_hardware import count_npus, missing_for_npu, peak_rss, torch_npu_version
from runtimes.device_kinds import check_kind
from runtimes.process.job import EncodeJob, Job, TrainJob
from runtimes.process.launcher import Ranks
from runtimes.registry import check_supported
from runtimes.torch import gaudi, kernels
from runtimes.torch.kernels import DeviceHooks

ALONE = Ranks()
log = logging.getLogger("kiln")
#: PyTorch's device types other than `cpu`, with their names for messages.
ACCELERATORS = {"cuda": "CUDA", "npu": "Ascend NPU", "hpu": "Gaudi"}
_NAME = re.compile(
    r"(?P<kind>auto|cpu|mps|cuda|npu|hpu)(?:(?<!auto)(?<!cpu)(?<!mps):(?P<number>\d+))?"
)


def make_deterministic(enabled: bool = True, *, tf32: bool = False) -> None:
    """Make results bitwise reproducible on one machine, or allow the fastest kernels.

    An operator without a deterministic kernel raises RuntimeError. `warn_only` is off because
    PyTorch would then keep the nondeterministic backward pass of CUDA's fused attention.

    Call it before the first use of a device: cuBLAS reads its setting at initialization.

    Args:
        enabled: whether results repeat to the bit.
        tf32: whether CUDA computes float32 products and convolutions in TF32.
    """
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(enabled)
    # Filling costs time, and no code here reads uninitialized memory.
    torch.utils.deterministic.fill_uninitialized_memory = False
    # Timing-based algorithm search is not reproducible.
    torch.backends.cudnn.benchmark = not enabled
    torch.backends.cudnn.deterministic = enabled
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32


def is_deterministic(settings: Train, device: torch.device) -> bool:
    """Whether `train.deterministic`, or its default for the device, demands exact repetition."""
    if settings.deterministic is None:
        return device.type not in ("cuda", "mps")
    return settings.deterministic


def warn_of_slow_float32(settings: Train, device: torch.device) -> None:
    """Log a warning if a CUDA device trains without tensor cores."""
    if device.type == "cuda" and settings.compute_dtype == "float32" and not settings.allow_tf32:
        log.warning(
            "float32 products use no tensor cores: train.mixed_precision=bf16 is many times as "
            "fast, and train.allow_tf32=true faster too"
        )


def choose_device(name: str, ranks: Ranks = ALONE) -> torch.device:
    """Select the PyTorch device of this process.

    `auto` selects CUDA if available, else the CPU; NPUs and Gaudis must be named. With several
    processes, each has its own device, numbered by its local rank.

    Args:
        name: `auto`, `cpu`, `mps`, `cuda[:N]`, `npu[:N]` or `hpu[:N]`.
        ranks: this process and the number of processes.

    Raises:
        Refused: the device is absent, or this machine has fewer devices than processes.
    """
    known = "auto, cpu, mps, cuda[:N], npu[:N] or hpu[:N]"
    match = _NAME.fullmatch(name)
    if match is None:
        raise Refused(f"device {name!r} is not for runtime torch ({known})")
    kind = match["kind"]
    number = match["number"]
    if kind == "auto":
        kind = "cuda" if torch.cuda.device_count() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    if kind == "mps":
        return _choose_mps(ranks)
    if kind == "npu":
        kernels.load()
    if kind == "hpu":
        gaudi.load()
    words = ACCELERATORS[kind]
    there = torch.get_device_module(kind).device_count()
    if ranks.world > 1 and number is not None:
        raise Refused(
            f"device {name} is one device for {ranks.world} processes: set auto or {kind}"
        )
    if ranks.world > 1 and ranks.local_world > there:
        raise Refused(
            f"{ranks.local_world} processes need one {words} device each, "
            f"this machine has {there}: lower train.processes, or set device cpu"
        )
    if int(number or 0) >= there:
        raise Refused(f"device {name}: this machine has {there} {words} devices; set auto or cpu")
    if kind == "hpu":  # Habana's bridge shows one device per process
        return torch.device(kind)
    if ranks.world > 1:
        return torch.device(kind, ranks.local_rank)
    return torch.device(kind) if number is None else torch.device(kind, int(number))


def _choose_mps(ranks: Ranks) -> torch.device:
    """Apple's GPU. Raises Refused without one, or for several processes."""
    if not torch.backends.mps.is_available():
        raise Refused("device mps: this machine has no Apple GPU; set auto or cpu")
    if ranks.world > 1:
        raise Refused("device mps is one device: set train.processes=1")
    log.warning("device mps is untested: compare its losses with those of device cpu first")
    return torch.device("mps")


def open_device(
    name: str, ranks: Ranks = ALONE, settings: Hpu | None = None, compiled: str | None = None
) -> DeviceHooks:
    """Open the device of a name (see choose_device), with the hooks of its kind.

    Args:
        name: as in choose_device.
        ranks: this process and the number of processes.
        settings: settings of Gaudi devices.
        compiled: URL of the folder of compiled programs; None disables the cache.

    Raises:
        Refused: the device is absent, or does not support the settings.
    """
    if not name.startswith("hpu"):
        device = choose_device(name, ranks)
        if device.index is not None:  # new streams and events are of the current device
            torch.get_device_module(device).set_device(device)
        return DeviceHooks(device)
    settings = settings or Hpu()
    compile_cache = gaudi.load(settings, compiled)
    choose_device(name, ranks)
    if number := name.partition(":")[2]:  # the bridge shows it as the only device
        os.environ[gaudi.MODULE] = str(int(number))
    if ranks.world > 1:
        gaudi.load_hccl()
    return gaudi.Gaudi(settings, compile_cache)


def prepare(job: Job | EncodeJob) -> None:
    """Load Habana's PyTorch bridge for a job, see registry.prepare. Raises Refused."""
    gaudi.load(Train(**job.train).hpu if isinstance(job, TrainJob) else None, job.compiled)


def check(settings: Train) -> None:
    """Raise Refused for train settings that the devices of this machine do not support."""
    ranks = Ranks(world=settings.world_size, local_world=settings.processes)
    check_on_device(settings, choose_device(settings.device, ranks), ranks)


def check_on_device(settings: Train, device: torch.device, ranks: Ranks) -> None:
    """Raise Refused for train settings that a device, or the number of processes, rules out."""
    check_supported("torch", settings)
    check_kind(settings, device.type)
    optimizer = settings.optimizer
    if optimizer.endswith("_8bit") and find_spec("bitsandbytes") is None:
        words = f"{optimizer} needs bitsandbytes: make setup-cuda"
        if torch.version.hip:  # whose builds set-up does not install
            words = f"{optimizer} needs bitsandbytes, untried on ROCm: set adamw"
        raise Refused(words, setting="train.optimizer")
    if settings.fused_backward and ranks.world > 1:  # torchrun and mpirun ignore train.processes
        raise Refused("train.fused_backward is for one process; set false")
    kernels.check_attention(settings.attention, device)
    compiles = settings.compile not in ("auto", "none") and device.type in ("cpu", "cuda")
    if compiles and detect_hardware.find_c_compiler() is None:
        words = f"{settings.compile}: {kernels.NO_COMPILER}, or set train.compile=none"
        raise Refused(words, setting="train.compile")
    if device.type == "hpu":
        gaudi.check(settings)
    fsdp = settings.fsdp
    if fsdp == "all" or fsdp in (1, ranks.world):
        return
    if ranks.world % fsdp:
        raise Refused(f"train.fsdp {fsdp} does not divide train.processes {ranks.world}")
    if device.type == "npu":
        raise Refused(f"train.fsdp: {fsdp} is not for device npu: set 1 or all")


def describe(device: torch.device) -> str:
    """Name of a device for messages, such as `cuda:0 (NVIDIA H100)`."""
    if device.type in ACCELERATORS:
        name = torch.get_device_module(device).get_device_name(device)
        return f"{device.type}:{device.index or 0} ({name})"
    if device.type == "mps":
        return "mps (Apple GPU, untested)"
    return f"cpu ({torch.get_num_threads()} threads, {platform.machine()})"


def peak_bytes(device: torch.device) -> int:
    """Peak bytes allocated on the device so far; on a CPU, peak bytes of this process."""
    if device.type in ACCELERATORS:
        return int(torch.get_device_module(device).max_memory_allocated(device))
    return peak_rss()


def free_memory() -> None:
    """Return memory of deleted models from PyTorch's allocators to the device and the host."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without CUDA
    empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None)  # PyTorch 2.9 has none
    if empty_host_cache is not None and torch.cuda.is_initialized():
        empty_host_cache()  # pinned memory, which holds offloaded models
    if "torch_npu" in sys.modules:
        torch.get_device_module("npu").empty_cache()


def versions() -> dict[str, str]:
    """Versions of the packages that affect numerical results."""
    return {name: version(name) for name in ("torch", "diffusers", "numpy")}


def probe() -> Probe:
    """Devices and versions of this machine. NPUs and Gaudis are listed without opening them."""
    devices = [describe(torch.device("cuda", n)) for n in range(torch.cuda.device_count())]
    if torch_npu_version() is not None and not missing_for_npu():
        devices += [f"npu:{n} (torch_npu {torch_npu_version()})" for n in range(count_npus())]
    if detect_hardware.hpu_bridge_version() is not None:
        bridge = f"habana_frameworks {detect_hardware.hpu_bridge_version()}"
        count = detect_hardware.count_hpus() or gaudi.count()
        devices += [f"hpu:{n} ({bridge})" for n in range(count)]
    if torch.backends.mps.is_available():
        devices.append(describe(torch.device("mps")))
    return Probe(True, [*devices, describe(torch.device("cpu"))], versions())
