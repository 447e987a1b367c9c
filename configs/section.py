"""What every section of a recipe has in common."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A part of a recipe: unknown keys are errors, and values do not change once loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    def refuse_changed(self, names: Iterable[str], choice: str) -> None:
        """Raise ValueError for the first of the settings that is not as by default, where another
        choice leaves it without effect. A resolved recipe names them all: that is no fault."""
        for name in names:
            default = type(self).model_fields[name].default
            if getattr(self, name) != default:
                raise ValueError(
                    f"{name} has no effect with {choice}: leave it at {json.dumps(default)}"
                )
