"""The devices on which a machine encodes: one encoder process for each."""

from __future__ import annotations

from runtimes.contract import WrongInput
from runtimes.hosts.detect_ascend import count_npus
from runtimes.hosts.detect_gaudi import count_hpus
from runtimes.process.job import EncodeJob
from runtimes.registry import spec_of


def encoder_devices(job: EncodeJob, processes: int | None) -> list[str]:
    """Names of the devices, as `encode.device` names them. None of them is opened.

    A runtime that shards batches over all its devices (jax, xla) needs one process.

    Args:
        processes: number of encoder processes; None: one for each accelerator, one on a CPU.

    Raises:
        WrongInput: this machine has fewer accelerators than processes.
    """
    kind, numbered, _ = job.device.partition(":")
    kind = _found(job.runtime) if kind == "auto" else kind
    if kind == "cpu":
        return ["cpu"] * (processes or 1)
    shares_all = spec_of(job.runtime).uses_all_devices
    devices = [job.device]
    if not numbered and not shares_all:
        devices = [f"{kind}:{number}" for number in range(_count(kind))] or devices
    if processes is not None and processes > len(devices):
        reason = f"runtime {job.runtime} uses all devices in one" if shares_all else "none is free"
        raise WrongInput(
            f"encode.processes: device {job.device} is for {len(devices)} of the {processes} "
            f"processes ({reason}): lower it, or set it to null"
        )
    return devices[:processes]


def _found(runtime: str) -> str:
    """The kind of device that `auto` selects: see choose_device and choose of the runtimes."""
    if runtime == "torch":
        return "cuda" if _count("cuda") else "cpu"
    if runtime == "mindspore":
        return "ascend" if count_npus() else "cpu"
    return "auto"


def _count(kind: str) -> int:
    if kind == "cuda":
        import torch

        return torch.cuda.device_count()
    counts = {"npu": count_npus, "ascend": count_npus, "hpu": count_hpus}
    return counts[kind]() if kind in counts else 0
