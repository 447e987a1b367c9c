"""Which runtimes there are, and where: a new one is a package and a line here."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from configs.training import Train
from runtimes.base import Probe, Runtime, WrongInput
from runtimes.events import Events

#: Seconds that another environment's interpreter has to say what it finds.
PROBE_SECONDS = 120.0


@dataclass(frozen=True)
class Place:
    """Where a runtime's code is, and the environment that it runs in."""

    #: With `runtime.TheRuntime(events)` and, quicker to import, `device.probe()` and `.check`.
    package: str
    needs: tuple[str, ...]  # what must be installed
    environment: str | None = None  # a folder beside our environment's; None is ours


RUNTIMES = {
    "torch": Place("runtimes.torch", ("torch", "diffusers", "transformers", "safetensors")),
}


def open_runtime(name: str, events: Events) -> Runtime:
    """The runtime of that name. Raises WrongInput if it is unknown or cannot be imported."""
    return cast(Runtime, _module(name, "runtime").TheRuntime(events))


def interpreter(name: str) -> str:
    """The Python that a runtime's processes run on.

    Raises WrongInput if it is unknown, or its environment has not been made.
    """
    environment = _place(name).environment
    if environment is None or environment == Path(sys.prefix).name:
        return sys.executable
    python = Path(sys.prefix).parent / environment / "bin/python"
    if not python.is_file():
        raise WrongInput(f"runtime {name} has an environment of its own: `make setup-{name}`")
    return str(python)


def check_installed(name: str) -> None:
    """Raise WrongInput if a runtime's packages are not here; unlike a probe, imports none."""
    if interpreter(name) != sys.executable:
        return  # it was made from a list, whole
    missing = [package for package in _place(name).needs if find_spec(package) is None]
    if missing:
        raise WrongInput(f"runtime {name} needs {', '.join(missing)}, not installed here")


def probe_runtime(name: str) -> Probe:
    """What the runtime of that name finds on this machine, by its own environment's word."""
    try:
        python = interpreter(name)
        if python == sys.executable:
            return cast(Probe, _module(name, "device").probe())
        return _ask(python, name)
    except WrongInput as error:
        return Probe(available=False, reason=str(error))


def check_settings(name: str, settings: Train) -> None:
    """Raise WrongInput for train settings that this machine's devices cannot serve.

    A runtime with an environment of its own is not asked: it says so once it is started.
    """
    if interpreter(name) == sys.executable:
        _module(name, "device").check(settings)


def _ask(python: str, name: str) -> Probe:
    command = [python, "-m", "runtimes", "--probe", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
        return Probe(**json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError, TypeError) as error:
        raise WrongInput(f"runtime {name}: {python} does not answer: {error}") from None


def _place(name: str) -> Place:
    if name not in RUNTIMES:
        raise WrongInput(f"runtime {name!r} is not known here (known: {', '.join(RUNTIMES)})")
    return RUNTIMES[name]


def _module(name: str, part: str) -> Any:
    try:
        return import_module(f"{_place(name).package}.{part}")
    except ImportError as error:
        raise WrongInput(
            f"runtime {name} cannot be imported in this environment: {error}"
        ) from None
