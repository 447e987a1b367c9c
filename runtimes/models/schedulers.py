"""Construct diffusers schedulers from their configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import diffusers

from runtimes.contract import WrongInput


def make_scheduler(config: Mapping[str, Any]) -> Any:
    """Construct the scheduler of the class `_class_name` in a config.

    Raises:
        WrongInput: diffusers has no scheduler of that name.
    """
    name = str(config.get("_class_name"))
    kind = getattr(diffusers, name, None)
    if kind is None or not issubclass(kind, diffusers.SchedulerMixin):
        raise WrongInput(f"the scheduler {name} is not of this version of diffusers")
    return kind.from_config(dict(config))
