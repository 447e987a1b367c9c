"""This machine: the C compiler that torch.compile calls, NVIDIA GPUs, and memory.

NVIDIA's driver and GPUs are detected by its files and tool; neither PyTorch nor CUDA is loaded.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

#: Compilers in the order in which Inductor and Triton look for them.
NAMES = ("g++", "gcc", "clang++", "clang", "cc")


def find_c_compiler() -> str | None:
    """Path of the compiler of CXX or CC, or of the first on PATH; None without one."""
    named = (os.environ.get(variable) for variable in ("CXX", "CC"))
    paths = (shutil.which(name) for name in (*filter(None, named), *NAMES))
    return next(filter(None, paths), None)


QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
SECONDS = 20.0  # a GPU without persistence mode starts first
#: The kernel module's version, and the folder of device files.
MODULE = Path("/proc/driver/nvidia/version")
DEVICES = Path("/dev")


@dataclass(frozen=True)
class NvidiaGpu:
    """One GPU, as the driver reports it."""

    name: str
    memory: int  # bytes


def find_gpus() -> list[NvidiaGpu]:
    """The GPUs with memory of their own; empty without a GPU, driver or tool."""
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=SECONDS, check=True)
        lines = (line.rpartition(",") for line in done.stdout.splitlines() if line.strip())
        return [NvidiaGpu(name.strip(), int(size) * 2**20) for name, _, size in lines]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def usable_gpus() -> list[NvidiaGpu]:
    """The GPUs of `find_gpus`; empty if PyTorch uses no GPU: a CPU build, or hidden GPUs.

    With `CUDA_VISIBLE_DEVICES` some GPUs may be hidden: its order differs from the tool's.
    """
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip()
    if not shown or shown.startswith("-") or torch_cuda_version() is None:
        return []
    return find_gpus()


def driver_version() -> str | None:
    """Version of the kernel module; `unknown` with device files only, None without a driver.

    A container has the device files of its own GPUs only.
    """
    try:
        match = re.search(r"Kernel Module\D*(\d+(?:\.\d+)+)", MODULE.read_text(errors="replace"))
        return match[1] if match else "unknown"
    except OSError:
        pass
    return "unknown" if any(DEVICES.glob("nvidia[0-9]*")) else None


def torch_cuda_version() -> str | None:
    """CUDA version of the installed PyTorch; None for a CPU build, or without PyTorch.

    Read from PyTorch's version.py: its import takes seconds.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=]*= *['\"]([^'\"]+)", text, re.MULTILINE)
    return match[1] if match else None


CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")  # "max" without a limit


def host_memory() -> int:
    """Bytes of the host's memory, or of its container's limit if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(CONTAINER_LIMIT.read_text(encoding="ascii")))
    except (OSError, ValueError):
        return total
