"""Which runtimes there are: a new one is a module and a line here."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

from runtimes.base import Probe, Runtime, WrongInput
from runtimes.events import Events

#: Name -> package with `runtime.TheRuntime(events)` and, quicker to import, `device.probe()`.
RUNTIMES = {"torch": "runtimes.torch"}
#: What must be installed for each.
NEEDS = {"torch": ("torch", "diffusers", "transformers", "safetensors")}


def open_runtime(name: str, events: Events) -> Runtime:
    """The runtime of that name. Raises WrongInput if it is unknown or cannot be imported."""
    return cast(Runtime, _module(name, "runtime").TheRuntime(events))


def check_installed(name: str) -> None:
    """Raise WrongInput if a runtime's packages are not here; unlike a probe, imports none."""
    missing = [package for package in NEEDS.get(name, ()) if find_spec(package) is None]
    if missing:
        raise WrongInput(f"runtime {name} needs {', '.join(missing)}, not installed here")


def probe_runtime(name: str) -> Probe:
    """What the runtime of that name finds on this machine."""
    try:
        return cast(Probe, _module(name, "device").probe())
    except WrongInput as error:
        return Probe(available=False, reason=str(error))


def _module(name: str, part: str) -> Any:
    if name not in RUNTIMES:
        raise WrongInput(f"runtime {name!r} is not known here (known: {', '.join(RUNTIMES)})")
    try:
        return import_module(f"{RUNTIMES[name]}.{part}")
    except ImportError as error:
        raise WrongInput(
            f"runtime {name} cannot be imported in this environment: {error}"
        ) from None
