"""Errors of Prefect's own settings, of its variables and its profile."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence

from pydantic import ValidationError


def wrong_prefect_setting(error: Exception) -> str | None:
    """What is wrong with Prefect's settings, in one line; None if the error is another one."""
    if not isinstance(error, ValidationError):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    if not any("/prefect/settings/" in frame.filename for frame in frames):
        return None
    return "; ".join(f"{_variables(one['loc'])}: {one['msg']}" for one in error.errors())


def _variables(location: Sequence[int | str]) -> str:
    """The variables of the environment that may set a setting, else its name."""
    name = "_".join(str(part) for part in location)
    known = [one for one in os.environ if one.startswith("PREFECT_") and one.endswith(name.upper())]
    return " or ".join(sorted(known)) or f"Prefect's profile: {name}"
