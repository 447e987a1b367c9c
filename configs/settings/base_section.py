"""The base class of a recipe's sections."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from configs.secrets import check_read_url, check_stored_url, check_unchained, check_unchained_url

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Dtype = Literal["float32", "bfloat16", "float16"]
#: Places that only this run reads: an http URL may hold credentials.
ReadUrl = Annotated[str, AfterValidator(check_read_url), AfterValidator(check_unchained)]
#: Places that artifacts name.
StoredUrl = Annotated[str, AfterValidator(check_stored_url), AfterValidator(check_unchained)]
#: Models, which artifacts name: a local path, a hub id or a URL.
ModelPlace = Annotated[str, AfterValidator(check_stored_url), AfterValidator(check_unchained_url)]
#: Files that only this run reads: a local path or a URL.
ReadFile = Annotated[str, AfterValidator(check_read_url), AfterValidator(check_unchained_url)]


def _without_null(given: Any) -> Any:
    if isinstance(given, dict):
        return {name: value for name, value in given.items() if value is not None}
    return given


#: Of a mapping: null instead of a value drops that of the extended recipe.
NullDrops = BeforeValidator(_without_null)


class Section(BaseModel):
    """A section of a recipe: unknown settings are errors, and values are immutable and finite."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_boolean_numbers(cls, settings: Any) -> Any:
        """Refuse true and false for a number, which pydantic would read as 1 and 0."""
        for name, value in settings.items() if isinstance(settings, dict) else ():
            if isinstance(value, bool) and name in cls.model_fields:
                kinds = _kinds(cls.model_fields[name].annotation)
                if kinds & {int, float} and bool not in kinds:
                    raise ValueError(f"{name} must be a number, not {json.dumps(value)}")
        return settings

    def refuse_changed(self, names: Iterable[str], choice: str) -> None:
        """Raise ValueError if a setting without effect differs from its default.

        Default values are accepted because a resolved recipe contains all settings.

        Args:
            names: settings without effect.
            choice: the setting that disables them, such as `mode: pynative`.
        """
        for name in names:
            default = type(self).model_fields[name].default
            if getattr(self, name) != default:
                raise ValueError(  # it may be set by a recipe that this one extends
                    f"{name} has no effect with {choice}: set it to {json.dumps(default)}, its "
                    "default, or change the other"
                )


def _kinds(annotation: Any) -> set[Any]:
    """The types that an annotation names, in unions and `Annotated` too."""
    return {annotation}.union(*map(_kinds, get_args(annotation)))
