"""What every section of a recipe has in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A part of a recipe: unknown keys are errors, and values do not change once loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
