"""Diffusers schedulers from their configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import diffusers

from runtimes.base import WrongInput
from runtimes.objective.scheduler import drawing_config


def make_scheduler(config: Mapping[str, Any]) -> Any:
    """The scheduler of the class that a config names. Raises WrongInput."""
    name = str(config.get("_class_name"))
    kind = getattr(diffusers, name, None)
    if kind is None or not issubclass(kind, diffusers.SchedulerMixin):
        raise WrongInput(f"the scheduler {name} is not of this version of diffusers")
    return kind.from_config(dict(config))


def chosen(scheduler: Any, sampler: Mapping[str, Any]) -> Any:
    """The scheduler that pictures are asked to be drawn with, if another than the model's own: over
    the same noise. Raises WrongInput if the model cannot be drawn with it."""
    name = sampler.get("scheduler")
    if name is None:
        return scheduler
    return make_scheduler(
        drawing_config({"_class_name": type(scheduler).__name__, **scheduler.config}, name)
    )
