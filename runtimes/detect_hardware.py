"""This machine: its C compiler, accelerators and memory, and this process's limits.

Detection reads files and package metadata, or calls NVIDIA's tool: it imports neither PyTorch nor
a vendor's package, and opens no device.
"""

from __future__ import annotations

import gc
import os
import re
import resource
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

#: Compilers in the order in which Inductor and Triton look for them.
COMPILERS = ("g++", "gcc", "clang++", "clang", "cc")


def find_c_compiler() -> str | None:
    """Path of the compiler of CXX or CC, or of the first on PATH; None without one."""
    named = (os.environ.get(variable) for variable in ("CXX", "CC"))
    paths = (shutil.which(name) for name in (*filter(None, named), *COMPILERS))
    return next(filter(None, paths), None)


NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
SECONDS = 20.0  # a GPU without persistence mode starts first
#: The kernel module's version, and the folder of device files.
NVIDIA_MODULE = Path("/proc/driver/nvidia/version")
NVIDIA_DEVICES = Path("/dev")


@dataclass(frozen=True)
class NvidiaGpu:
    """One GPU, as the driver reports it."""

    name: str
    memory: int  # bytes


def find_gpus() -> list[NvidiaGpu]:
    """The GPUs with memory of their own; empty without a GPU, driver or tool."""
    try:
        done = subprocess.run(
            NVIDIA_SMI, capture_output=True, text=True, timeout=SECONDS, check=True
        )
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


def nvidia_driver_version() -> str | None:
    """Version of the kernel module; `unknown` with device files only, None without a driver.

    A container has the device files of its own GPUs only.
    """
    try:
        text = NVIDIA_MODULE.read_text(errors="replace")
        number = re.search(r"Kernel Module\D*(\d+(?:\.\d+)+)", text)
        return number[1] if number else "unknown"
    except OSError:
        pass
    return "unknown" if any(NVIDIA_DEVICES.glob("nvidia[0-9]*")) else None


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


#: Share of the host's memory that a process may pin for weights.
PINNED = 0.8


#: Folders of the Linux kernel: accelerator devices, and the module of the habanalabs driver.
HPU_DEVICES = Path("/sys/class/accel")
HPU_MODULE = Path("/sys/module/habanalabs")
HABANA = "0x1da3"  # PCI vendor ID of Habana Labs
BRIDGE = "habana-torch-plugin"


def count_hpus() -> int:
    """Number of Gaudi accelerators that the driver lists."""
    vendors = (path / "device/vendor" for path in HPU_DEVICES.glob("accel[0-9]*"))
    return sum(path.is_file() and path.read_text().strip() == HABANA for path in vendors)


def hpu_driver_version() -> str | None:
    """Version of the habanalabs driver; `unknown` without a version file, None without a driver."""
    if not HPU_MODULE.is_dir():
        return None
    path = HPU_MODULE / "version"
    return path.read_text().strip() if path.is_file() else "unknown"


def hpu_bridge_version() -> str | None:
    """Version of Intel's PyTorch bridge, equal to the Gaudi software version; None if absent."""
    try:
        return version(BRIDGE)
    except PackageNotFoundError:
        return None


def missing_for_hpu() -> list[str]:
    """Requirements of a Gaudi that this machine does not meet, each with its remedy."""
    missing = []
    if not count_hpus():
        missing.append("no driver (no Gaudi in /sys/class/accel): install the one in deploy/gaudi")
    if hpu_bridge_version() is None:
        missing.append("no habana_frameworks: use Intel's container (deploy/gaudi)")
    return missing


#: Default folder of CANN; ASCEND_HOME_PATH, which CANN's set_env.sh exports, overrides it.
TOOLKIT = Path("/usr/local/Ascend/ascend-toolkit/latest")
NPU_DEVICES = Path("/dev")
#: Matches `version=8.0.0`, and the release 8.0.0 in `toolkit_running_version=[7.6.0.1.220:8.0.0]`.
_VERSION = re.compile(r"^\w*version=\[?(?:[^:\]\n]*:)?(\d[\w.-]*)", re.MULTILINE)


def count_npus() -> int:
    """Number of NPUs that the driver lists in /dev."""
    return sum(path.name[len("davinci") :].isdigit() for path in NPU_DEVICES.glob("davinci[0-9]*"))


def cann_version() -> str | None:
    """Version of the CANN toolkit; `unknown` if no version file exists, None without CANN."""
    home = Path(os.environ.get("ASCEND_HOME_PATH") or TOOLKIT)
    if not home.is_dir():
        return None
    for path in (home / "version.cfg", *sorted(home.glob("*/ascend_toolkit_install.info"))):
        if path.is_file() and (match := _VERSION.search(path.read_text(errors="replace"))):
            return match[1]
    return "unknown"


def torch_npu_version() -> str | None:
    """Version of the installed torch_npu, or None."""
    try:
        return version("torch_npu")
    except PackageNotFoundError:
        return None


def missing_for_npu() -> list[str]:
    """Requirements of an NPU that this machine does not meet, each with its remedy."""
    missing = []
    if not count_npus():
        missing.append("no driver (/dev/davinci0 is absent): install the one in deploy/ascend")
    if cann_version() is None:
        missing.append("no CANN: install it, and source its set_env.sh")
    return missing


#: Open files that macOS allows a process whose hard limit is infinite.
OPEN_MAX = 10_240


def peak_rss() -> int:
    """Peak resident memory of this process in bytes; 0 on systems without /proc."""
    # Not ru_maxrss: a child process inherits its parent's value, which may be larger.
    path = Path("/proc/self/status")
    status = path.read_text(encoding="ascii") if path.exists() else ""
    peak = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(peak[1]) * 1024 if peak else 0


def collect_garbage_rarely() -> None:
    """Let Python look for garbage after 100,000 new objects instead of 700.

    Imports and traces of models make millions of objects that live on, and each search visits
    them again: a tenth of the time that PyTorch, diffusers and transformers take to import.
    """
    gc.set_threshold(100_000, 50, 100)


def check_memory(size: int) -> None:
    """Raise MemoryError if this process cannot have `size` more bytes.

    Decoders report a failed allocation as damaged data. The bytes are not touched, so this takes
    microseconds and no memory.
    """
    bytes(size)


def raise_open_file_limit() -> int:
    """Allow as many open files as the system does; how many.

    Each mapped shard keeps a file descriptor, and each connection. The usual soft limit, 1,024, is
    less than 32 shards in each of 33 aspect buckets.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_MAX if hard == resource.RLIM_INFINITY else hard  # macOS refuses infinity
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(soft, most)
