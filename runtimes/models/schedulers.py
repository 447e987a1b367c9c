"""Diffusers schedulers from their configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import diffusers

from runtimes.contract import WrongInput


def make_scheduler(config: Mapping[str, Any]) -> Any:
    """The scheduler of the class that a config names. Raises WrongInput."""
    name = str(config.get("_class_name"))
    kind = getattr(diffusers, name, None)
    if kind is None or not issubclass(kind, diffusers.SchedulerMixin):
        raise WrongInput(f"the scheduler {name} is not of this version of diffusers")
    return kind.from_config(dict(config))
