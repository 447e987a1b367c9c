"""The table of runtimes, and functions that open or query one. A new runtime is a row here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from configs.train import Train
from runtimes.contract import Pipeline, PipelineEncoder, Probe, Runtime, WrongInput
from runtimes.families import FAMILIES, family_named
from runtimes.hosts.detect_gaudi import bridge_version
from runtimes.objective.scheduler_config import SCHEDULERS, TABULATED, drawing_config
from runtimes.process.job import EncodeJob, GenerateJob, Job, TrainJob

#: Time limit in seconds for a probe or check in a subprocess.
PROBE_SECONDS = 120.0


@dataclass(frozen=True)
class RuntimeSpec:
    """A runtime's package, environment and limits."""

    #: Contains `runtime.TheRuntime`, `generate.ThePipeline`, `encoder.open_encoder`, `device.probe`
    #: and `device.check`.
    #: `device` must import quickly.
    package: str
    needs: tuple[str, ...]  # packages that must be installed
    environment: str | None = None  # suffix of its virtual environment's folder; None: ours
    schedulers: tuple[str, ...] | None = None  # supported scheduler classes; None: all of diffusers
    #: Whether one process locks the device: the encoder process must end before training starts.
    exclusive: bool = False
    denoisers: tuple[str, ...] | None = None  # supported denoiser classes; None: all


RUNTIMES = {
    "torch": RuntimeSpec("runtimes.torch", ("torch", "diffusers", "transformers", "safetensors")),
    "jax": RuntimeSpec(
        "runtimes.jax", ("jax", "torchax", "diffusers"), exclusive=True, schedulers=TABULATED
    ),
    "xla": RuntimeSpec("runtimes.xla", ("torch_xla",), "-xla", schedulers=TABULATED),
    "mindspore": RuntimeSpec(
        "runtimes.mindspore",
        ("mindspore", "mindone"),
        environment="-mindspore",
        denoisers=("UNet2DConditionModel",),
    ),
}


def open_runtime(name: str) -> Runtime:
    """A new runtime. Raises WrongInput if the name is unknown or an import fails."""
    return cast(Runtime, _module(name, "runtime").TheRuntime())


def open_pipeline(job: GenerateJob) -> Pipeline:
    """The pipeline that generates a job's images. Raises WrongInput."""
    prepare(job)
    return cast(Pipeline, _module(job.runtime, "generate").ThePipeline(job))


def prepare(job: Job | EncodeJob) -> None:
    """Load Habana's bridge if the job needs it. Call it before any import of PyTorch code.

    PyTorch caches the list of accelerators at the first query, so the bridge must load first.

    Raises:
        WrongInput: the bridge cannot be loaded.
    """
    device = job.train.get("device", "auto") if isinstance(job, TrainJob) else job.device
    if device.partition(":")[0] == "hpu" and job.runtime == "torch":
        _module(job.runtime, "device").prepare(job)


def open_encoder(job: EncodeJob) -> PipelineEncoder:
    """Load a pipeline's encoders in this process. Raises WrongInput."""
    prepare(job)
    return cast(PipelineEncoder, _module(job.runtime, "encoder").open_encoder(job))


def check_scheduler(
    name: str,
    config: Mapping[str, Any],
    chosen: str | None,
    setting: str = "evaluate.scheduler",
) -> None:
    """Raise WrongInput if a runtime does not support the scheduler.

    Args:
        config: config of the model's own scheduler.
        chosen: a name in SCHEDULERS that replaces the model's scheduler; None keeps it.
        setting: the recipe's setting, for the message.
    """
    supported = _spec(name).schedulers
    kind = (config if chosen is None else drawing_config(config, chosen))["_class_name"]
    if supported is not None and kind not in supported:
        names = ", ".join(key for key, value in SCHEDULERS.items() if value in supported)
        raise WrongInput(
            f"{setting}: runtime {name} cannot draw with {kind}, which it has not "
            f"tabulated: choose one of {names}"
        )


def uses_tabulated_scheduler(name: str) -> bool:
    """Whether a runtime samples from tabulated coefficients (sample/tabulated_schedulers.py)."""
    return _spec(name).schedulers == TABULATED


def interpreter(name: str) -> str:
    """Path of the Python interpreter that runs a runtime's processes.

    Raises:
        WrongInput: the runtime is unknown, or its environment is not installed.
    """
    environment = _spec(name).environment
    if environment is None or sys.prefix.endswith(environment):
        return sys.executable
    python = Path(sys.prefix + environment, "bin/python")
    if not python.is_file():
        raise WrongInput(f"runtime {name} needs its own environment: run `make setup-{name}`")
    return str(python)


def check_installed(name: str) -> None:
    """Raise WrongInput if a runtime lacks packages. Unlike a probe, it imports none of them."""
    if has_own_environment(name):
        return  # its own environment was installed as a whole
    missing = [package for package in _spec(name).needs if find_spec(package) is None]
    if missing:
        raise WrongInput(f"runtime {name} needs {', '.join(missing)}, not installed here")


def probe_runtime(name: str) -> Probe:
    """Probe this machine for a runtime, in the runtime's own environment."""
    try:
        if _needs_subprocess(python := interpreter(name)):
            return Probe(**_query(python, "--probe", name))
        return probe_here(name)
    except (WrongInput, TypeError) as error:
        return Probe(available=False, reason=str(error))


def probe_here(name: str) -> Probe:
    """`probe_runtime` in this process. Raises WrongInput."""
    return cast(Probe, _module(name, "device").probe())


def check_devices(name: str, asked: Mapping[str, str]) -> None:
    """Raise WrongInput if a runtime is not available, or one of the devices is missing.

    Args:
        asked: setting -> device.
    """
    found = probe_runtime(name)
    if not found.available:
        raise WrongInput(f"runtime {name}: {found.reason}")
    names = {words.split()[0] for words in found.devices}  # cpu, cuda:0, ...
    names |= {device.partition(":")[0] for device in names}
    for setting, device in asked.items():
        if device not in {"auto", *names}:
            known = ", ".join(found.devices)
            raise WrongInput(f"{setting}: {device} is not on this machine ({known})")


def check_settings(name: str, settings: Train) -> None:
    """Raise WrongInput for train settings that the runtime or its device does not support."""
    if not _needs_subprocess(python := interpreter(name)):
        check_settings_here(name, settings)
    elif (
        wrong := _query(python, "--check", name, settings.model_dump_json())["wrong"]
    ) is not None:
        raise WrongInput(wrong)


def check_settings_here(name: str, settings: Train) -> None:
    """`check_settings` in this process. Raises WrongInput."""
    _module(name, "device").check(settings)


def check_family(name: str, family: str) -> None:
    """Raise WrongInput if a runtime does not support a model family."""
    denoisers = _spec(name).denoisers
    if denoisers is not None and family_named(family).denoiser_class not in denoisers:
        known = (f.name for f in FAMILIES.values() if f.denoiser_class in denoisers)
        raise WrongInput(
            f"a model of family {family} is not for runtime {name}, which supports "
            f"{', '.join(known)}: choose runtime torch"
        )


def has_own_environment(name: str) -> bool:
    """Whether a runtime needs another virtual environment than this process's."""
    return interpreter(name) != sys.executable


def encodes_in_subprocess(job: EncodeJob) -> bool:
    """Whether the encoders need a subprocess: for another environment, or to release the device.

    A process that has opened a Gaudi locks it as well.
    """
    exclusive = _spec(job.runtime).exclusive or job.device.startswith("hpu")
    return exclusive or has_own_environment(job.runtime)


def _needs_subprocess(python: str) -> bool:
    """Whether a probe or check must run in a subprocess.

    It must for another environment. It must also where Habana's bridge is installed: the bridge
    would change PyTorch in this process, and cannot be unloaded.
    """
    return python != sys.executable or bridge_version() is not None


def _query(python: str, *arguments: str) -> dict[str, Any]:
    """The JSON object in the last line of output of a subprocess."""
    command = [python, "-P", "-m", "runtimes", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError, TypeError) as error:
        raise WrongInput(f"runtime {arguments[1]}: {python} does not answer: {error}") from None


def _spec(name: str) -> RuntimeSpec:
    if name not in RUNTIMES:
        raise WrongInput(f"runtime {name!r} is not known here (known: {', '.join(RUNTIMES)})")
    return RUNTIMES[name]


def _module(name: str, module: str) -> Any:
    try:
        return import_module(f"{_spec(name).package}.{module}")
    except ImportError as error:
        raise WrongInput(
            f"runtime {name} cannot be imported in this environment: {error}"
        ) from None
