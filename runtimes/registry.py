"""Which runtimes there are, and where: a new one is a package and a line here."""

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

from configs.training import Train
from runtimes.contract import PipelineEncoder, Probe, Runtime, WrongInput
from runtimes.families import FAMILIES, family_named
from runtimes.hosts.gaudi import bridge_version
from runtimes.objective.noise_scheduler import SCHEDULERS, TABULATED, drawing_config
from runtimes.process.events import Events
from runtimes.process.job import EncodeJob, Job, TrainJob

#: Seconds that another environment's interpreter has to say what it finds.
PROBE_SECONDS = 120.0


@dataclass(frozen=True)
class RuntimeSpec:
    """Where a runtime's code is, and the environment that it runs in."""

    #: With `runtime.TheRuntime`, `encode.open_encoder` and, quicker to import, `device.probe` and
    #: `device.check`.
    package: str
    needs: tuple[str, ...]  # what must be installed
    environment: str | None = None  # what its folder has after our environment's name; None: ours
    schedulers: tuple[str, ...] | None = None  # classes that it draws with; None: all of diffusers
    #: Whether an open device is closed to other processes: who encodes must end before training.
    exclusive: bool = False
    denoisers: tuple[str, ...] | None = None  # classes that it trains; None is all


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


def open_runtime(name: str, events: Events) -> Runtime:
    """The runtime of that name. Raises WrongInput if it is unknown or cannot be imported."""
    return cast(Runtime, _module(name, "runtime").TheRuntime(events))


def prepare(job: Job | EncodeJob) -> None:
    """Have a job's device known before its runtime's modules are imported, where it must be: what
    looks for accelerators without it finds none for good. Raises WrongInput."""
    device = job.train.get("device", "auto") if isinstance(job, TrainJob) else job.device
    if device.partition(":")[0] == "hpu" and job.runtime == "torch":
        _module(job.runtime, "device").prepare(job)


def open_encoder(job: EncodeJob) -> PipelineEncoder:
    """A pipeline's encoders in this process. Raises WrongInput if they cannot be had."""
    prepare(job)
    return cast(PipelineEncoder, _module(job.runtime, "encode").open_encoder(job))


def check_scheduler(
    name: str,
    config: Mapping[str, Any],
    chosen: str | None,
    setting: str = "evaluate.scheduler",
) -> None:
    """Raise WrongInput, naming the setting, if a runtime cannot draw with a model's scheduler, or
    the one chosen."""
    known = _spec(name).schedulers
    kind = (config if chosen is None else drawing_config(config, chosen))["_class_name"]
    if known is not None and kind not in known:
        names = ", ".join(word for word, its in SCHEDULERS.items() if its in known)
        raise WrongInput(
            f"{setting}: runtime {name} cannot draw with {kind}, which is not one "
            f"program: choose one of {names}"
        )


def uses_tabulated_scheduler(name: str) -> bool:
    """Whether a runtime samples by a table of numbers (sample/tabulated_scheduler.py)."""
    return _spec(name).schedulers == TABULATED


def interpreter(name: str) -> str:
    """The Python that a runtime's processes run on.

    Raises WrongInput if it is unknown, or its environment has not been made.
    """
    environment = _spec(name).environment
    if environment is None or sys.prefix.endswith(environment):
        return sys.executable
    python = Path(sys.prefix + environment, "bin/python")
    if not python.is_file():
        raise WrongInput(f"runtime {name} has an environment of its own: `make setup-{name}`")
    return str(python)


def check_installed(name: str) -> None:
    """Raise WrongInput if a runtime's packages are not here; unlike a probe, imports none."""
    if has_own_environment(name):
        return  # it was made from a list, whole
    missing = [package for package in _spec(name).needs if find_spec(package) is None]
    if missing:
        raise WrongInput(f"runtime {name} needs {', '.join(missing)}, not installed here")


def probe_runtime(name: str) -> Probe:
    """What the runtime of that name finds on this machine, by its own environment's word."""
    try:
        if _needs_subprocess(python := interpreter(name)):
            return Probe(**_query(python, "--probe", name))
        return probe_here(name)
    except (WrongInput, TypeError) as error:
        return Probe(available=False, reason=str(error))


def probe_here(name: str) -> Probe:
    """The same in a process of the runtime's environment. Raises WrongInput."""
    return cast(Probe, _module(name, "device").probe())


def check_devices(name: str, asked: Mapping[str, str]) -> None:
    """Raise WrongInput if a runtime is not here, or one of the devices is not.

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
    """Raise WrongInput for train settings that the runtime, or a device here, cannot serve."""
    if not _needs_subprocess(python := interpreter(name)):
        check_settings_here(name, settings)
    elif (
        wrong := _query(python, "--check", name, settings.model_dump_json())["wrong"]
    ) is not None:
        raise WrongInput(wrong)


def check_settings_here(name: str, settings: Train) -> None:
    """The same in a process of the runtime's environment. Raises WrongInput."""
    _module(name, "device").check(settings)


def check_family(name: str, family: str) -> None:
    """Raise WrongInput if a runtime does not know models of a family."""
    denoisers = _spec(name).denoisers
    if denoisers is not None and family_named(family).denoiser_class not in denoisers:
        known = (f.name for f in FAMILIES.values() if f.denoiser_class in denoisers)
        raise WrongInput(
            f"a model of family {family} is not for runtime {name} (it knows {', '.join(known)}): "
            "take runtime torch"
        )


def has_own_environment(name: str) -> bool:
    """Whether a runtime is run in another environment than ours."""
    return interpreter(name) != sys.executable


def encodes_in_subprocess(job: EncodeJob) -> bool:
    """Whether encoders are to be in a process of their own. A Gaudi that is open is closed to
    others, too."""
    exclusive = _spec(job.runtime).exclusive or job.device.startswith("hpu")
    return exclusive or has_own_environment(job.runtime)


def _needs_subprocess(python: str) -> bool:
    """Whether a runtime's questions are for another process: of its own environment; or as Habana's
    bridge may be loaded for them, which would change ours for good."""
    return python != sys.executable or bridge_version() is not None


def _query(python: str, *question: str) -> dict[str, Any]:
    """What another environment answers, in the last line that it prints."""
    command = [python, "-P", "-m", "runtimes", *question]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError, TypeError) as error:
        raise WrongInput(f"runtime {question[1]}: {python} does not answer: {error}") from None


def _spec(name: str) -> RuntimeSpec:
    if name not in RUNTIMES:
        raise WrongInput(f"runtime {name!r} is not known here (known: {', '.join(RUNTIMES)})")
    return RUNTIMES[name]


def _module(name: str, part: str) -> Any:
    try:
        return import_module(f"{_spec(name).package}.{part}")
    except ImportError as error:
        raise WrongInput(
            f"runtime {name} cannot be imported in this environment: {error}"
        ) from None
