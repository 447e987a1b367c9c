"""Open the device of a job, and list the devices of this machine."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import version

import mindspore as ms
from mindspore import mint

from configs.errors import Refused
from configs.settings.train import Train
from runtimes.contract import Probe
from runtimes.detect_hardware import cann_version, missing_for_npu, peak_rss
from runtimes.process.launcher import Ranks, launched
from runtimes.registry import check_supported

NAME = re.compile(r"(?P<kind>auto|cpu|ascend)(?::(?P<number>\d+))?")
ALONE = Ranks()


def check(settings: Train) -> None:
    """Raise Refused for train settings that this runtime or this machine does not support."""
    alone = Ranks(world=settings.world_size, local_world=settings.processes)
    ranks = Ranks.here() if launched() else alone
    on_cpu = choose(settings.device, ranks)[0] == "CPU"
    name = "runtime mindspore"
    check_supported("mindspore", settings)
    if settings.fsdp != 1 and ranks.world > 1:
        raise Refused(f"{settings.fsdp} is not for {name}: set 1", setting="train.fsdp")
    if on_cpu:
        precision(settings.compute_dtype, "CPU", "train.mixed_precision")
    if on_cpu and settings.mindspore.jit_level == "O2" and settings.mindspore.mode == "graph":
        raise Refused("O2 needs CANN, on Ascend: set O0 or O1", setting="train.mindspore.jit_level")


def precision(dtype: str, target: str, setting: str) -> ms.Type:
    """MindSpore's dtype of a name.

    Args:
        dtype: float32, bfloat16 or float16.
        target: CPU or Ascend.
        setting: name of the setting, for the message.

    Raises:
        Refused: the device does not support the dtype.
    """
    if target == "CPU" and dtype == "bfloat16":
        raise Refused("MindSpore has bfloat16 on Ascend, not on a CPU", setting=setting)
    return getattr(ms, dtype)


def choose(name: str, ranks: Ranks = ALONE) -> tuple[str, int]:
    """Select the device of this process.

    `auto` selects an Ascend NPU if available, else the CPU. With several processes, each has
    its own NPU, numbered by its local rank.

    Args:
        name: `auto`, `cpu`, `ascend` or `ascend:N`.
        ranks: this process and the number of processes.

    Returns:
        MindSpore's device target (CPU or Ascend), and the device's number.

    Raises:
        Refused: the device is absent, or this machine has fewer NPUs than processes.
    """
    match = NAME.fullmatch(name)
    if match is None or (match["kind"] != "ascend" and match["number"]):
        raise Refused(f"device {name!r} is not for runtime mindspore (auto, cpu, ascend[:N])")
    there = count_npus()
    if match["kind"] == "cpu" or (match["kind"] == "auto" and not there):
        return "CPU", 0
    number = ranks.local_rank if match["number"] is None else int(match["number"])
    if ranks.world > 1 and match["number"] is not None:
        raise Refused(
            f"device {name} is one device for {ranks.world} processes: set auto or ascend"
        )
    if max(number, ranks.local_world - 1) >= there:
        raise Refused(
            f"device {name}: {max(number + 1, ranks.local_world)} NPUs are needed, MindSpore finds "
            f"{there} here ({'; '.join(missing_for_npu()) or 'npu-smi info lists them'})"
        )
    return "Ascend", number


def start(name: str, ranks: Ranks = ALONE) -> str:
    """Open the device that `choose` selects, for the lifetime of this process.

    Returns:
        MindSpore's device target, CPU or Ascend.

    Raises:
        Refused: the device is absent, or this process has opened another device.
    """
    target, number = choose(name, ranks)
    current = ms.get_context("device_target") if _OPEN else target
    if current != target:
        raise Refused(f"this process has opened {current}: {target} needs a new process")
    if not _OPEN:
        ms.set_device(target, number)
        ms.set_context(mode=ms.PYNATIVE_MODE)
        ms.set_deterministic(True)
        _OPEN.append(target)
        if target == "CPU" and not _has_cpu_kernels():
            raise Refused(f"device cpu: {_NO_CPU_KERNELS}")
    return target


_OPEN: list[str] = []  # device target that this process has opened; at most one element


_NO_CPU_KERNELS = "MindSpore has no CPU kernels of mindone's operators: use runtime torch"


def _has_cpu_kernels() -> bool:
    """Whether operators run on the CPU: MindSpore itself has these kernels for Ascend alone."""
    # Asynchronous launch raises errors later. On a CPU it is also 10 to 50 times slower, as it
    # synchronizes threads for each operator.
    ms.runtime.launch_blocking()
    try:
        mint.arange(1)
    except RuntimeError:
        return False
    return True


def count_npus() -> int:
    """Number of Ascend NPUs that MindSpore can use."""
    try:
        return int(ms.hal.device_count("Ascend")) if ms.hal.is_available("Ascend") else 0
    except (RuntimeError, ValueError, KeyError):  # a CPU-only build of MindSpore
        return 0


def describe() -> str:
    """Name of the open device for messages, such as `ascend:0 (Ascend910B2)`."""
    if _OPEN == ["Ascend"]:
        number = ms.get_context("device_id")
        return f"ascend:{number} ({ms.hal.get_device_name(number, 'Ascend')})"
    threads = os.environ.get("OMP_NUM_THREADS", os.cpu_count())
    return f"cpu ({threads} threads, {platform.machine()})"


def memory_bytes() -> int:
    """Peak bytes allocated on the device so far; on a CPU, peak bytes of this process."""
    return int(ms.runtime.max_memory_allocated()) if _OPEN == ["Ascend"] else peak_rss()


def versions() -> dict[str, str]:
    """Versions of the packages that affect numerical results."""
    packages = {name: version(name) for name in ("mindspore", "mindone", "numpy")}
    cann = cann_version()
    return packages | ({"cann": cann} if cann else {})


def probe() -> Probe:
    """Devices and versions of this machine; no device is opened."""
    there = count_npus()
    if there:
        npus = [f"ascend:{n} ({ms.hal.get_device_name(n, 'Ascend')})" for n in range(there)]
        return Probe(True, npus, versions())
    if not _has_cpu_kernels():
        reason = f"no NPU (see `ascend` in `kiln doctor`), and {_NO_CPU_KERNELS}"
        return Probe(False, [], versions(), reason)
    without = "; ".join(missing_for_npu()) or "MindSpore finds none"
    return Probe(True, [f"cpu (no NPU: {without})"], versions())
