"""Secrets of a flow: variables of the environment, and Prefect's secret blocks."""

from __future__ import annotations

import os
from typing import Any

from configs.settings.recipe import team_of


def block_name(name: str, model: str) -> str:
    """Name of Prefect's secret block; each team has its own.

    Args:
        model: name of the model, perhaps with its team.
    """
    return "-".join(filter(None, (name, team_of(model))))


def block(name: str, model: str) -> str | None:
    """The secret of a block; None outside of a flow, and if there is no such block."""
    from prefect.context import FlowRunContext

    if FlowRunContext.get() is None:
        return None
    from prefect.blocks.system import Secret

    try:
        loaded: Any = Secret.load(block_name(name, model))
        return str(loaded.get())
    except ValueError:  # no such block
        return None


def secret(variable: str, name: str, model: str) -> str | None:
    """The secret of a variable of the environment, else of a block, else None.

    A line break at its end, as files of secrets have, does not count.
    """
    return (os.environ.get(variable) or block(name, model) or "").strip() or None
