"""The table of runtimes, and functions that open or query a runtime. A new runtime is a row here.

The checks find what a runtime supports on this machine: packages, devices, settings, families,
schedulers. A runtime with an environment of its own is probed in that environment, by a subprocess.
A machine computes shards on the `devices_of` a stage: one process for each.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from configs.errors import Refused
from configs.settings.train import Train
from runtimes.contract import Pipeline, PipelineEncoder, Probe, Runtime
from runtimes.detect_hardware import count_hpus, count_npus, hpu_bridge_version
from runtimes.device_kinds import check_kind, check_name
from runtimes.families import FAMILIES, family_named
from runtimes.objective.noise_schedule import SCHEDULERS, TABULATED, drawing_config, is_flow
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import EncodeJob, GenerateJob, Job, TrainJob
from runtimes.process.questions import Unanswered, ask


@dataclass(frozen=True)
class RuntimeSpec:
    """A runtime's package, environment and limits."""

    #: Contains `runtime.TheRuntime`, `sampler.ThePipeline`, `sampler.open_encoder`, `device.probe`
    #: and `device.check`.
    #: `device` must import quickly.
    package: str
    needs: tuple[str, ...]  # packages that must be installed
    environment: str | None = None  # suffix of its virtual environment's folder; None: ours
    schedulers: tuple[str, ...] | None = None  # supported scheduler classes; None: all of diffusers
    #: Whether one process locks the device: the encoder process must end before training starts.
    exclusive: bool = False
    denoisers: tuple[str, ...] | None = None  # supported denoiser classes; None: all
    uses_all_devices: bool = False  # whether one process shares batches among all devices
    #: Train setting -> the values that the runtime supports, of those that others support too.
    supports: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


_ADAMW = {"optimizer": ("adamw",), "fused_backward": (False,)}
_WHOLE_BLOCKS = _ADAMW | {"gradient_checkpointing": ("none", "blocks")}


RUNTIMES = {
    "torch": RuntimeSpec("runtimes.torch", ("torch", "diffusers", "transformers", "safetensors")),
    "jax": RuntimeSpec(
        "runtimes.jax",
        ("jax", "torchax", "diffusers"),
        exclusive=True,
        schedulers=TABULATED,
        uses_all_devices=True,
        supports=_ADAMW,
    ),
    "xla": RuntimeSpec(
        "runtimes.xla",
        ("torch_xla",),
        environment="-xla",
        schedulers=TABULATED,
        uses_all_devices=True,
        supports=_WHOLE_BLOCKS,
    ),
    "mindspore": RuntimeSpec(
        "runtimes.mindspore",
        ("mindspore", "mindone"),
        environment="-mindspore",
        denoisers=("UNet2DConditionModel",),
        supports=_WHOLE_BLOCKS,
    ),
}


def open_runtime(name: str) -> Runtime:
    """A new runtime. Raises Refused if the name is unknown or an import fails."""
    return cast(Runtime, import_from(name, "runtime").TheRuntime())


def open_pipeline(job: GenerateJob, base: Base) -> Pipeline:
    """The pipeline that generates a job's images, from its base. Raises Refused."""
    prepare(job)
    return cast(Pipeline, import_from(job.runtime, "sampler").ThePipeline(job, base))


def prepare(job: Job | EncodeJob) -> None:
    """Load Habana's bridge if the job needs it. Call it before any import of PyTorch code.

    PyTorch caches the list of accelerators at the first query, so the bridge must load first.

    Raises:
        Refused: the bridge cannot be loaded.
    """
    device = job.train.get("device", "auto") if isinstance(job, TrainJob) else job.device
    if device.partition(":")[0] == "hpu" and job.runtime == "torch":
        import_from(job.runtime, "device").prepare(job)


def open_encoder(job: EncodeJob) -> PipelineEncoder:
    """Load a pipeline's encoders in this process. Raises Refused."""
    prepare(job)
    return cast(PipelineEncoder, import_from(job.runtime, "sampler").open_encoder(job))


def interpreter(name: str) -> str:
    """Path of the Python interpreter that runs a runtime's processes.

    Raises:
        Refused: the runtime is unknown, or its environment is not installed.
    """
    environment = spec_of(name).environment
    if environment is None or sys.prefix.endswith(environment):
        return sys.executable
    python = Path(sys.prefix + environment, "bin/python")
    if not python.is_file():
        raise Refused(f"runtime {name} needs its own environment: run `make setup-{name}`")
    return str(python)


def has_own_environment(name: str) -> bool:
    """Whether a runtime needs another virtual environment than this process's."""
    return interpreter(name) != sys.executable


def needs_subprocess(name: str, device: str) -> bool:
    """Whether models need a subprocess: for another environment, or to release the device.

    A process that has opened a Gaudi locks it as well.
    """
    exclusive = spec_of(name).exclusive or device.startswith("hpu")
    return exclusive or has_own_environment(name)


def spec_of(name: str) -> RuntimeSpec:
    if name not in RUNTIMES:
        raise Refused(f"runtime {name!r} is not known here (known: {', '.join(RUNTIMES)})")
    return RUNTIMES[name]


def import_from(name: str, module: str) -> Any:
    try:
        return import_module(f"{spec_of(name).package}.{module}")
    except ImportError as error:
        raise Refused(f"runtime {name} cannot be imported in this environment: {error}") from None


#: Time limit in seconds for a probe or check in a subprocess.
PROBE_SECONDS = 120.0


def check_installed(name: str) -> None:
    """Raise Refused if a runtime lacks packages. Unlike a probe, it imports none of them."""
    if has_own_environment(name):
        return  # its own environment was installed as a whole
    missing = [package for package in spec_of(name).needs if find_spec(package) is None]
    if missing:
        raise Refused(f"runtime {name} needs {', '.join(missing)}, not installed here")


def probe_runtime(name: str) -> Probe:
    """Probe this machine for a runtime, in the runtime's own environment."""
    try:
        if _needs_subprocess(python := interpreter(name)):
            return Probe(**_query(python, "--probe", name))
        return cast(Probe, import_from(name, "device").probe())
    except (Refused, TypeError) as error:
        return Probe(available=False, reason=str(error))


def check_devices(name: str, asked: Mapping[str, str]) -> None:
    """Raise Refused if a runtime is not available, or a device is missing.

    Args:
        asked: setting -> device.
    """
    probe = probe_runtime(name)
    if not probe.available:
        raise Refused(f"runtime {name}: {probe.reason}")
    for setting, device in asked.items():
        if device not in {"auto", *probe.names}:
            known = ", ".join(probe.devices)
            raise Refused(
                f"{device} is not on this machine ({known})",
                setting=setting,
                remedy=f"set one of {', '.join(('auto', *sorted(probe.names)))}",
            )


def check_settings(name: str, settings: Train) -> None:
    """Raise Refused for train settings that the runtime or its device does not support.

    An NPU is asked in a subprocess: torch_npu would change PyTorch in this one for good.
    """
    python = interpreter(name)
    if _needs_subprocess(python) or settings.device.startswith("npu"):
        _query(python, "--check", name, settings.model_dump_json())
    else:
        import_from(name, "device").check(settings)


#: Runtime or kind of device -> the values of train.fsdp that it supports, of several processes.
SHARDS: dict[str, tuple[int | str, ...]] = {"mindspore": (1,), "hpu": (1,), "npu": (1, "all")}


def check_elsewhere(name: str, settings: Train) -> None:
    """Raise Refused for train settings that the runtime lacks on any machine.

    The hosts of a cluster check what only their devices can tell, when training starts.
    """
    check_supported(name, settings)
    check_name(name, settings)
    kind = settings.device.partition(":")[0]
    if name == "torch" and kind != "auto":
        check_kind(settings, kind)
    if settings.world_size == 1:
        return
    shards = "all" if settings.shard_group == settings.world_size else settings.fsdp
    for where, key in ((f"runtime {name}", name), (f"device {kind}", kind)):
        values = SHARDS.get(key, (shards,))
        if shards not in values:
            lacks = "has no shard groups" if "all" in values else "does not shard weights"
            remedy = f"set {' or '.join(map(str, values))}"
            words = (
                f"{settings.fsdp}: {where} {lacks}, neither on one host nor on several: {remedy}"
            )
            raise Refused(words, setting="train.fsdp")
    if name == "torch" and settings.world_size % settings.shard_group:
        words = f"{settings.fsdp} does not divide the {settings.world_size} processes of all hosts"
        raise Refused(words, setting="train.fsdp")


def check_supported(name: str, settings: Train) -> None:
    """Raise Refused for a value of a train setting that the runtime supports on no device."""
    if settings.compute_dtype == "float16" and name != "mindspore":  # which has a loss scale
        raise Refused("fp16 is for runtime mindspore: set bf16", setting="train.mixed_precision")
    if name == "xla" and settings.processes > 1:
        raise Refused(
            "train.processes is not for runtime xla: one process uses all devices of a host, and "
            "train.fsdp sets how many share each array"
        )
    changes_lora = settings.method == "lora" and (settings.lora.dora or settings.lora.dropout)
    if name == "mindspore" and changes_lora:
        words = f"dora and dropout are not for runtime {name}: leave them out"
        raise Refused(words, setting="train.lora")
    for setting, values in spec_of(name).supports.items():
        if (value := getattr(settings, setting)) not in values:
            words = f"{value} is not for runtime {name}: set {values[-1]}"
            raise Refused(words, setting=f"train.{setting}")


def check_family(name: str, family: str, device: str = "auto") -> None:
    """Raise Refused if a runtime, or the kind of a device, does not support a model family."""
    kind = device.partition(":")[0]
    if (why := family_named(family).refused_devices.get(kind)) is not None:
        raise Refused(f"a model of family {family} is not for device {kind}: {why}")
    denoisers = spec_of(name).denoisers
    if denoisers is not None and family_named(family).denoiser_class not in denoisers:
        known = (f.name for f in FAMILIES.values() if f.denoiser_class in denoisers)
        raise Refused(
            f"a model of family {family} is not for runtime {name}, which supports "
            f"{', '.join(known)}: choose runtime torch"
        )


def check_scheduler(
    name: str, config: Mapping[str, Any], chosen: str | None, steps: int, section: str = "evaluate."
) -> None:
    """Raise Refused for a scheduler that the runtime lacks, or steps that the scheduler lacks.

    Args:
        config: config of the model's own scheduler.
        chosen: a name in SCHEDULERS that replaces the model's scheduler; None keeps it.
        steps: steps of a drawing.
        section: section of the settings, for messages.
    """
    supported = spec_of(name).schedulers
    kind = (config if chosen is None else drawing_config(config, chosen))["_class_name"]
    if supported is not None and kind not in supported:
        names = ", ".join(key for key, value in SCHEDULERS.items() if value in supported)
        raise Refused(
            f"{section}scheduler: runtime {name} cannot draw with {kind}, which it has not "
            f"tabulated: choose one of {names}"
        )
    if is_flow(config):
        if config.get("shift_terminal") and steps < 2:  # its formula divides by zero at one step
            raise Refused(f"{section}num_inference_steps: {kind} takes 2 or more steps, not 1")
        return
    # PNDM begins with three Runge-Kutta steps (arXiv 2202.09778).
    least = 4 if kind == "PNDMScheduler" and not config.get("skip_prk_steps") else 1
    most = config.get("num_train_timesteps", 1000)
    if not least <= steps <= most:
        raise Refused(
            f"{section}num_inference_steps: {kind} takes {least} to {most} steps, not {steps}"
        )


def _needs_subprocess(python: str) -> bool:
    """Whether a probe or check must run in a subprocess.

    It must for another environment. It must also where Habana's bridge is installed: the bridge
    would change PyTorch in this process, and cannot be unloaded.
    """
    return python != sys.executable or hpu_bridge_version() is not None


@cache  # each takes seconds, and a run asks before and after its server starts
def _query(python: str, *arguments: str) -> dict[str, Any]:
    """The answer of a runtime's process to `--probe` or `--check`. Raises Refused."""
    try:
        return ask("-m", "runtimes", *arguments, python=python, seconds=PROBE_SECONDS)
    except (OSError, Unanswered) as error:
        why = error.last if isinstance(error, Unanswered) else error
        raise Refused(f"runtime {arguments[1]}: {python} does not answer: {why}") from None


def devices_of(
    runtime: str, device: str, processes: int | None, setting: str = "encode.processes"
) -> list[str]:
    """Names of a runtime's devices, as `encode.device` names them. None of them is opened.

    A runtime that shards batches over all its devices (jax, xla) needs one process.

    Args:
        processes: number of processes; None: one for each accelerator, one on a CPU.
        setting: that number's, for errors.

    Raises:
        Refused: this machine has fewer accelerators than processes.
    """
    kind, numbered, _ = device.partition(":")
    accelerator = {"torch": "cuda", "mindspore": "ascend"}.get(runtime)
    if kind == "auto" and accelerator is not None:  # as the runtime chooses: see its device.py
        kind = accelerator if _count(accelerator) else "cpu"
    if kind == "cpu":
        return ["cpu"] * (processes or 1)
    shares_all = spec_of(runtime).uses_all_devices
    devices = [device]
    if not numbered and not shares_all:
        devices = [f"{kind}:{number}" for number in range(_count(kind))] or devices
    if processes is not None and processes > len(devices):
        reason = f"runtime {runtime} uses all devices in one" if shares_all else "none is free"
        raise Refused(
            f"device {device} is for {len(devices)} of the {processes} "
            f"processes ({reason}): lower it, or set it to null",
            setting=setting,
        )
    return devices[:processes]


def _count(kind: str) -> int:
    if kind == "cuda":
        import torch

        return torch.cuda.device_count()
    counts = {"npu": count_npus, "ascend": count_npus, "hpu": count_hpus}
    return counts[kind]() if kind in counts else 0
