"""Which device a job runs on, and what there is on this machine."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
from importlib.metadata import version
from pathlib import Path

import torch

from configs.training import Train
from runtimes.base import Probe, WrongInput
from runtimes.ranks import Ranks
from runtimes.torch.optimizers import check_optimizer

ALONE = Ranks()
#: Of glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3


def make_deterministic() -> None:
    """The same job on the same machine gives the same bits, as far as PyTorch has such kernels.

    Call it before anything is put on a device: cuBLAS reads its setting when it starts.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs time; nothing reads it
    # No algorithm chosen by a race of timings, and float32 means float32.
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def choose_device(name: str, ranks: Ranks = ALONE) -> torch.device:
    """`auto` is CUDA when there is one, else the CPU; each process of a machine has a CUDA device
    of its own.

    Raises:
        WrongInput: it is not there, or there are fewer than processes.
    """
    there = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if there else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise WrongInput(f"device {name!r} is not known (auto, cpu, cuda or cuda:N)") from None
    if device.type not in ("cpu", "cuda"):
        raise WrongInput(f"device {name!r} is not for this runtime (auto, cpu, cuda or cuda:N)")
    if device.type == "cuda" and ranks.world > 1:
        if device.index is not None:
            raise WrongInput(f"device {name} is one, for {ranks.world} processes: set auto or cuda")
        if ranks.local_world > there:
            raise WrongInput(
                f"{ranks.local_world} processes want a CUDA device each, this machine has {there}: "
                "lower train.processes, or set device cpu"
            )
        device = torch.device("cuda", ranks.local_rank)
    if device.type == "cuda" and (device.index or 0) >= there:
        raise WrongInput(f"device {name}: this machine has {there} CUDA devices; set auto or cpu")
    return device


def check(settings: Train) -> None:
    """Raise WrongInput for train settings that the devices of this machine cannot serve."""
    ranks = Ranks(world=settings.processes, local_world=settings.processes)
    check_optimizer(settings, choose_device(settings.device, ranks))


def keep_freed_memory() -> None:
    """Have the C library keep what is freed for the next allocation (Linux with glibc).

    By default it hands large blocks back to the system, which clears each page again when it is
    next used: on a CPU that was 4% of a step of a small model.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 2**30)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_TOP_PAD, 2**26)


def describe(device: torch.device) -> str:
    """The device in words, such as `cuda:0 (NVIDIA H100)`."""
    if device.type == "cuda":
        return f"cuda:{device.index or 0} ({torch.cuda.get_device_name(device)})"
    return f"cpu ({torch.get_num_threads()} threads, {platform.machine()})"


def peak_bytes(device: torch.device) -> int:
    """Most bytes in use so far: of the device's memory, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Not ru_maxrss: a child starts with its parent's, which may have been larger.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(peak[1]) * 1024 if peak else 0


def free_memory() -> None:
    """Hand back to the device what models that nobody holds any more have left in the cache."""
    gc.collect()
    torch.cuda.empty_cache()  # nothing, where there is no CUDA


def versions() -> dict[str, str]:
    """Versions of the packages that numbers depend on."""
    return {name: version(name) for name in ("torch", "diffusers", "numpy")}


def probe() -> Probe:
    """What this runtime finds here."""
    devices = [describe(torch.device("cuda", n)) for n in range(torch.cuda.device_count())]
    return Probe(True, [*devices, describe(torch.device("cpu"))], versions())
