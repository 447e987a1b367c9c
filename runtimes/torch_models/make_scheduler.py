"""Construct diffusers schedulers from their configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import diffusers

from configs.errors import Refused
from configs.settings.train import Train
from runtimes.objective import noise_schedule
from runtimes.pipeline_folder.folder import Base


def make_scheduler(config: Mapping[str, Any]) -> Any:
    """Construct the scheduler of the class `_class_name` in a config.

    Raises:
        Refused: diffusers has no scheduler of that name.
    """
    name = str(config.get("_class_name"))
    kind = getattr(diffusers, name, None)
    if kind is None or not issubclass(kind, diffusers.SchedulerMixin):
        raise Refused(f"the scheduler {name} is not of this version of diffusers")
    return kind.from_config(dict(config))


def trained_scheduler(base: Base, settings: Train) -> Any:
    """The scheduler of the trained model, or None where the settings keep the base's."""
    config = noise_schedule.trained_scheduler_config(base.scheduler, settings)
    return None if config is None else make_scheduler(config)
