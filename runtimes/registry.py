"""Which runtimes there are: a new one is a module and a line here."""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

from runtimes.base import Probe, Runtime, WrongInput
from runtimes.events import Events

#: Name -> module with a class `TheRuntime(events)` and a function `probe()`.
RUNTIMES = {"torch": "runtimes.torch.runtime"}


def open_runtime(name: str, events: Events) -> Runtime:
    """The runtime of that name. Raises WrongInput if it is unknown or cannot be imported."""
    return cast(Runtime, _module(name).TheRuntime(events))


def probe_runtime(name: str) -> Probe:
    """What the runtime of that name finds on this machine."""
    try:
        return cast(Probe, _module(name).probe())
    except WrongInput as error:
        return Probe(available=False, reason=str(error))


def _module(name: str) -> Any:
    if name not in RUNTIMES:
        raise WrongInput(f"runtime {name!r} is not known here (known: {', '.join(RUNTIMES)})")
    try:
        return import_module(RUNTIMES[name])
    except ImportError as error:
        raise WrongInput(
            f"runtime {name} cannot be imported in this environment: {error}"
        ) from None
