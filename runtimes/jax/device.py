"""Open JAX's devices for a job, and list the devices of this machine."""

from __future__ import annotations

import os
import re
from importlib.metadata import version
from importlib.util import find_spec

import jax
import torch

from configs.errors import Refused
from configs.secrets import one_line
from configs.settings.train import Train
from runtimes.contract import Probe
from runtimes.detect_hardware import peak_rss
from runtimes.process.collectives import HostCollectives, free_port
from runtimes.process.compile_cache import CompileCache
from runtimes.process.launcher import Ranks
from runtimes.registry import check_supported
from runtimes.spmd.tpu_sharding import mesh_shape, peak_of
from runtimes.torch_models.gpu_specs import known_peak

PLATFORMS = ("cpu", "tpu", "cuda")
_compiling: list[float] = []  # seconds of each compilation


def check(settings: Train) -> None:
    """Raise Refused for train settings that this runtime or this machine does not support."""
    count = _count_devices(settings.device, settings.processes)
    check_supported("jax", settings)
    # In a run of several processes, other machines can have devices of the mesh, too.
    if count is not None and Ranks.here().world == 1:
        mesh_shape(count * settings.hosts, settings.fsdp)


def start(name: str, compiled: str | None, dtype: str) -> CompileCache:
    """Open all devices of platform `auto`, `cpu`, `tpu` or `cuda`.

    Args:
        name: name of the platform.
        compiled: URL of the folder of compiled programs; None disables the cache.
        dtype: compute dtype. For float32, matrix products also have float32 precision; TPUs would
            otherwise multiply in bfloat16.

    Raises:
        Refused: the platform is absent, or this process has opened another platform.
    """
    _count_devices(name)
    if name != "auto":
        jax.config.update("jax_platforms", name)
    exact = "highest" if dtype == "float32" else "default"
    jax.config.update("jax_default_matmul_precision", exact)
    try:
        backend = jax.default_backend()
    except RuntimeError as error:
        raise Refused(f"device {name}: JAX finds no such device here: {one_line(error)}") from None
    if name != "auto" and backend != {"cuda": "gpu"}.get(name, name):
        raise Refused(f"device {name}: this process has already opened {backend}")
    if not _compiling:
        jax.monitoring.register_event_duration_secs_listener(_count)
        _compiling.append(0.0)
    kept = CompileCache(compiled, f"jax-{version('jaxlib')}")
    if kept.path is not None:
        jax.config.update("jax_compilation_cache_dir", str(kept.path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return kept


def _count_devices(name: str, processes: int = 1) -> int | None:
    """Number of devices that `processes` of this machine will have; None for TPU chips.

    No device is opened: an open TPU is not available to other processes.

    Raises:
        Refused: the platform is absent, or the processes cannot share its devices.
    """
    if name != "auto" and name not in PLATFORMS:
        raise Refused(f"device {name!r} is not for runtime jax (auto, cpu, tpu or cuda)")
    if name == "tpu" and find_spec("libtpu") is None:
        raise Refused("device tpu: runtime jax needs libtpu, see docs/tpu.md")
    if name == "cuda" and not _has_cuda_plugin():
        raise Refused("device cuda: runtime jax needs jax[cuda13], see docs/tpu.md")
    if name == "tpu" or (name == "auto" and _has_tpu()):
        if processes > 1:
            raise Refused("train.processes: one process has all TPU chips of a machine: leave it 1")
        return None
    if name != "cpu" and (gpus := _gpus()):
        if gpus < processes:
            raise Refused(
                f"{processes} processes need one GPU each, this machine has {gpus}: lower "
                "train.processes, or set device cpu"
            )
        return gpus if processes == 1 else processes
    flags = os.environ.get("XLA_FLAGS", "")
    emulated = re.findall(r"--xla_force_host_platform_device_count=(\d+)", flags)
    return int(emulated[-1] if emulated else 1) * processes


def _has_tpu() -> bool:
    return os.path.exists("/dev/accel0") or os.path.exists("/dev/vfio/0")


def _has_cuda_plugin() -> bool:
    return any(find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin"))


def _gpus() -> int:
    """Number of GPUs that JAX can use."""
    return torch.cuda.device_count() if _has_cuda_plugin() else 0


def join(ranks: Ranks, hosts: HostCollectives, device: str) -> None:
    """Initialize jax.distributed, before any device is opened; `shut_down` ends it.

    Several processes of a machine with GPUs use one GPU each.

    Args:
        ranks: this process and the number of processes.
        hosts: broadcasts the coordinator's port.
        device: name of the platform, as in `start`.

    Raises:
        Refused: this machine has fewer GPUs than processes.
    """
    if ranks.world == 1 or jax.distributed.is_initialized():
        return
    _count_devices(device, ranks.local_world)
    shared = ranks.local_world > 1 and device != "cpu" and _gpus() > 0
    # Without it, a failing process waits minutes for lost peers and is then aborted.
    jax.config.update("jax_enable_recoverability", True)
    # It takes SIGTERM, which requests a stop (runtimes.process.launcher).
    jax.config.update("jax_enable_preemption_service", False)
    port = hosts.broadcast(free_port() if ranks.first else 0)
    jax.distributed.initialize(
        f"{os.environ['MASTER_ADDR']}:{port}",
        num_processes=ranks.world,
        process_id=ranks.rank,
        local_device_ids=[ranks.local_rank] if shared else None,
    )


def shut_down(ranks: Ranks, hosts: HostCollectives) -> None:
    """Undo `join` in all processes. Rank 0, the coordinator, disconnects after the others."""
    if not ranks.first:
        jax.distributed.shutdown()
    hosts.any(False)
    jax.distributed.shutdown()


def describe() -> str:
    """Name of the open devices for messages, such as `tpu v5p (8 devices)`."""
    platform = jax.default_backend()
    kind = jax.devices()[0].device_kind
    name = platform if kind.lower() == platform else f"{platform} {kind}"
    return f"{name} ({jax.device_count()} devices)"


def peak_flops(compute_dtype: str) -> float | None:
    """Peak FLOP/s of one device at a compute dtype; None if it is unknown."""
    kind = jax.devices()[0].device_kind
    if jax.default_backend() == "gpu":
        return known_peak(kind, compute_dtype)
    return peak_of(kind) if compute_dtype == "bfloat16" else None


def memory_bytes() -> int:
    """Peak bytes used on the first local device so far; on a CPU, by this process."""
    stats = jax.local_devices()[0].memory_stats()
    return int(stats["peak_bytes_in_use"]) if stats else peak_rss()


def compile_seconds() -> float:
    """Seconds spent on compilation, or on loading cached programs, since `start`."""
    return sum(_compiling)


def _count(event: str, duration_secs: float, **_: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compiling.append(duration_secs)


def versions() -> dict[str, str]:
    """Versions of the packages that affect numerical results."""
    return {n: version(n) for n in ("jax", "jaxlib", "torch", "torchax", "diffusers", "numpy")}


def probe() -> Probe:
    """Devices and versions of this machine.

    No device is opened: an open TPU is not available to other processes.
    """
    devices = []
    if _has_tpu():
        devices.append("tpu" if find_spec("libtpu") else "tpu (install libtpu to use it)")
    if torch.cuda.device_count():
        devices.append("cuda" if _has_cuda_plugin() else "cuda (install jax[cuda13] to use it)")
    return Probe(True, [*devices, "cpu (XLA)"], versions())
