"""Which device a job runs on, and what there is on this machine."""

from __future__ import annotations

import gc
import os
import platform
import re
import sys
from importlib.metadata import version

import torch

from configs.training import Hpu, Train
from runtimes.contract import Probe, WrongInput
from runtimes.hosts import gaudi
from runtimes.hosts.ascend import count_npus, missing_components, torch_npu_version
from runtimes.models.precision import check_precision
from runtimes.process.job import EncodeJob, Job, TrainJob
from runtimes.process.memory import peak_of_process
from runtimes.process.ranks import Ranks
from runtimes.torch import hpu, npu
from runtimes.torch.device_kind import DeviceKind
from runtimes.torch.optimizers import check_optimizer

ALONE = Ranks()
#: Kinds of devices beside the CPU, by PyTorch's names, in words.
ACCELERATORS = {"cuda": "CUDA", "npu": "Ascend NPU", "hpu": "Gaudi"}
_NAME = re.compile(r"(?P<kind>auto|cpu|cuda|npu|hpu)(?:(?<!auto)(?<!cpu):(?P<number>\d+))?")


def make_deterministic() -> None:
    """The same job on the same machine gives the same bits.

    An operator without a deterministic kernel raises RuntimeError. With `warn_only`, PyTorch would
    take attention's fast backward pass on CUDA, which adds in any order.

    Call it before anything is put on a device: cuBLAS reads its setting when it starts.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs time; nothing reads it
    # No algorithm chosen by a race of timings, and float32 means float32.
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def choose_device(name: str, ranks: Ranks = ALONE) -> torch.device:
    """`auto` is CUDA when there is one, else the CPU; each process of a machine has a device of its
    own. An NPU or a Gaudi must be asked for.

    Raises:
        WrongInput: it is not there, or there are fewer than processes.
    """
    known = "auto, cpu, cuda[:N], npu[:N] or hpu[:N]"
    match = _NAME.fullmatch(name)
    if match is None:
        raise WrongInput(f"device {name!r} is not for this runtime ({known})")
    kind, number = match["kind"], match["number"]
    if kind == "auto":
        kind = "cuda" if torch.cuda.device_count() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    if kind == "npu":
        npu.load()
    if kind == "hpu":
        hpu.load()
    words, there = ACCELERATORS[kind], torch.get_device_module(kind).device_count()
    if ranks.world > 1 and number is not None:
        raise WrongInput(f"device {name} is one, for {ranks.world} processes: set auto or {kind}")
    if ranks.world > 1 and ranks.local_world > there:
        raise WrongInput(
            f"{ranks.local_world} processes want one {words} device each, "
            f"this machine has {there}: lower train.processes, or set device cpu"
        )
    if int(number or 0) >= there:
        raise WrongInput(
            f"device {name}: this machine has {there} {words} devices; set auto or cpu"
        )
    if kind == "hpu":  # a process sees one
        return torch.device(kind)
    if ranks.world > 1:
        return torch.device(kind, ranks.local_rank)
    return torch.device(kind) if number is None else torch.device(kind, int(number))


def open_device(
    name: str, ranks: Ranks = ALONE, settings: Hpu | None = None, compiled: str | None = None
) -> DeviceKind:
    """The device of that name, see choose_device, with what its kind wants.

    Args:
        settings: of a Gaudi.
        compiled: URL of the folder for compiled programs, where the kind has any; None keeps none.

    Raises:
        WrongInput: it is not there, or does not go with the settings.
    """
    if not name.startswith("hpu"):
        return DeviceKind(choose_device(name, ranks))
    settings = settings or Hpu()
    compile_cache = hpu.load(settings, compiled)
    choose_device(name, ranks)
    if number := name.partition(":")[2]:
        hpu.choose_module(int(number))
    if ranks.world > 1:
        hpu.load_hccl()
    return hpu.Gaudi(settings, compile_cache)


def prepare(job: Job | EncodeJob) -> None:
    """Load a Gaudi's bridge for a job, see registry.prepare. Raises WrongInput."""
    settings = Train(**job.train).hpu if isinstance(job, TrainJob) else None
    hpu.load(settings, job.compiled)


def check(settings: Train) -> None:
    """Raise WrongInput for train settings that the devices of this machine cannot serve."""
    ranks = Ranks(world=settings.processes, local_world=settings.processes)
    check_precision(settings)
    device = choose_device(settings.device, ranks)
    check_optimizer(settings, device)
    if device.type == "hpu":
        hpu.check(settings)


def describe(device: torch.device) -> str:
    """The device in words, such as `cuda:0 (NVIDIA H100)`."""
    if device.type in ACCELERATORS:
        name = torch.get_device_module(device).get_device_name(device)
        return f"{device.type}:{device.index or 0} ({name})"
    return f"cpu ({torch.get_num_threads()} threads, {platform.machine()})"


def peak_bytes(device: torch.device) -> int:
    """Most bytes in use so far: of the device's memory, or of this process."""
    if device.type in ACCELERATORS:
        return int(torch.get_device_module(device).max_memory_allocated(device))
    return peak_of_process()


def free_memory() -> None:
    """Hand back to the device what models that nobody holds any more have left in the cache."""
    gc.collect()
    torch.cuda.empty_cache()  # nothing, where there is no CUDA
    if "torch_npu" in sys.modules:
        torch.get_device_module("npu").empty_cache()


def versions() -> dict[str, str]:
    """Versions of the packages that numbers depend on."""
    return {name: version(name) for name in ("torch", "diffusers", "numpy")}


def probe() -> Probe:
    """What this runtime finds here. NPUs and Gaudis are told of as the driver shows them, not
    opened."""
    devices = [describe(torch.device("cuda", n)) for n in range(torch.cuda.device_count())]
    if torch_npu_version() is not None and not missing_components():
        devices += [f"npu:{n} (torch_npu {torch_npu_version()})" for n in range(count_npus())]
    if gaudi.bridge_version() is not None:
        bridge = f"habana_frameworks {gaudi.bridge_version()}"
        devices += [f"hpu:{n} ({bridge})" for n in range(gaudi.count_hpus() or hpu.count())]
    return Probe(True, [*devices, describe(torch.device("cpu"))], versions())
