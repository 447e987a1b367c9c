"""Check what a runtime supports on this machine: packages, devices, settings, families, schedulers.

A runtime with an environment of its own is probed in that environment, by a subprocess.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any, cast

from configs.settings.train import Train
from runtimes.contract import Probe, WrongInput
from runtimes.families import FAMILIES, family_named
from runtimes.hosts.detect_gaudi import bridge_version
from runtimes.objective.noise_schedule import is_flow
from runtimes.objective.scheduler_config import SCHEDULERS, drawing_config
from runtimes.registry import has_own_environment, import_from, interpreter, spec_of

#: Time limit in seconds for a probe or check in a subprocess.
PROBE_SECONDS = 120.0


def check_installed(name: str) -> None:
    """Raise WrongInput if a runtime lacks packages. Unlike a probe, it imports none of them."""
    if has_own_environment(name):
        return  # its own environment was installed as a whole
    missing = [package for package in spec_of(name).needs if find_spec(package) is None]
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
    return cast(Probe, import_from(name, "device").probe())


def check_devices(name: str, asked: Mapping[str, str]) -> None:
    """Raise WrongInput if a runtime is not available, or one of the devices is missing.

    Args:
        asked: setting -> device.
    """
    found = probe_runtime(name)
    if not found.available:
        raise WrongInput(f"runtime {name}: {found.reason}")
    for setting, device in asked.items():
        if device not in {"auto", *found.names}:
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
    import_from(name, "device").check(settings)


def check_family(name: str, family: str, device: str = "auto") -> None:
    """Raise WrongInput if a runtime, or the kind of a device, does not support a model family."""
    kind = device.partition(":")[0]
    if (why := family_named(family).refused_devices.get(kind)) is not None:
        raise WrongInput(f"a model of family {family} is not for device {kind}: {why}")
    denoisers = spec_of(name).denoisers
    if denoisers is not None and family_named(family).denoiser_class not in denoisers:
        known = (f.name for f in FAMILIES.values() if f.denoiser_class in denoisers)
        raise WrongInput(
            f"a model of family {family} is not for runtime {name}, which supports "
            f"{', '.join(known)}: choose runtime torch"
        )


def check_scheduler(
    name: str,
    config: Mapping[str, Any],
    chosen: str | None,
    steps: int,
    section: str = "evaluate.",
) -> None:
    """Raise WrongInput for a scheduler that the runtime lacks, or steps that the scheduler lacks.

    Args:
        config: config of the model's own scheduler.
        chosen: a name in SCHEDULERS that replaces the model's scheduler; None keeps it.
        steps: of a drawing.
        section: of the settings, for messages.
    """
    supported = spec_of(name).schedulers
    kind = (config if chosen is None else drawing_config(config, chosen))["_class_name"]
    if supported is not None and kind not in supported:
        names = ", ".join(key for key, value in SCHEDULERS.items() if value in supported)
        raise WrongInput(
            f"{section}scheduler: runtime {name} cannot draw with {kind}, which it has not "
            f"tabulated: choose one of {names}"
        )
    if is_flow(config):
        if config.get("shift_terminal") and steps < 2:  # its formula divides by zero at one step
            raise WrongInput(f"{section}num_inference_steps: {kind} takes 2 or more steps, not 1")
        return
    # PNDM begins with three Runge-Kutta steps (arXiv 2202.09778).
    least = 4 if kind == "PNDMScheduler" and not config.get("skip_prk_steps") else 1
    most = config.get("num_train_timesteps", 1000)
    if not least <= steps <= most:
        raise WrongInput(
            f"{section}num_inference_steps: {kind} takes {least} to {most} steps, not {steps}"
        )


def _needs_subprocess(python: str) -> bool:
    """Whether a probe or check must run in a subprocess.

    It must for another environment. It must also where Habana's bridge is installed: the bridge
    would change PyTorch in this process, and cannot be unloaded.
    """
    return python != sys.executable or bridge_version() is not None


@cache  # each takes seconds, and a run asks before and after its server starts
def _query(python: str, *arguments: str) -> dict[str, Any]:
    """The JSON object in the last line of output of a subprocess."""
    command = [python, "-P", "-m", "runtimes", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError, TypeError) as error:
        raise WrongInput(f"runtime {arguments[1]}: {python} does not answer: {error}") from None
