"""A section of a recipe, and `setting`: what a setting is, said once, beside its field.

Keys, warnings, plans, the resume of a training, docs/settings.md and docs/coming-from.md derive
from it.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, pairwise
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator
from pydantic.annotated_handlers import GetJsonSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema

from configs.secrets import unchained, without_credentials

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Dtype = Literal["float32", "bfloat16", "float16"]
_Stored = AfterValidator(partial(without_credentials, is_stored=True))
_Read = AfterValidator(partial(without_credentials, is_stored=False))
_UnchainedUrl = AfterValidator(partial(unchained, also_paths=False))
#: A URL that only this run reads and joins to others: an http URL may hold credentials.
BaseUrl = Annotated[str, _Read]
#: Places that only this run reads.
ReadUrl = Annotated[str, _Read, AfterValidator(unchained)]
#: Places that artifacts name.
StoredUrl = Annotated[str, _Stored, AfterValidator(unchained)]
#: Models, which artifacts name: a local path, a hub id or a URL.
ModelPlace = Annotated[str, _Stored, _UnchainedUrl]
#: Files that only this run reads: a local path or a URL.
ReadFile = Annotated[str, _Read, _UnchainedUrl]


def _without_null(section: Any) -> Any:
    if isinstance(section, dict):
        return {name: value for name, value in section.items() if value is not None}
    return section


#: A mapping in which null drops the value from the extended recipe.
NullDrops = BeforeValidator(_without_null)

#: Why no key has a setting. content: keys have a digest of what it names; execution: it changes how
#: a stage runs; limit: it ends or refuses a run; destination: it says where results go; label: a
#: name for people; command: one command alone reads it.
NotInKey = Literal["content", "execution", "limit", "destination", "label", "command"]


def setting(
    default: Any = ...,
    *,
    not_in_key: NotInKey | None = None,
    in_key_with: str = "",
    needs: str = "",
    fixed_by_weights: bool = False,
    plan: str = "",
    aka: str | tuple[str, ...] = (),
    **field: Any,
) -> Any:
    """A field of a section; the string below it is its description.

    Args:
        default: without it, a recipe must set it.
        not_in_key: why the key of the section's stage lacks it, and all settings in it. A training
            may resume with another value.
        in_key_with: condition under which the key has it, and without which it has not. A new
            setting with its own name here leaves the keys of older recipes as they are.
        needs: condition without which it has no effect: `NAME`, `NAME == VALUE` or `NAME != VALUE`,
            joined by ` or `. A name starts in the section or in the recipe; values are as in YAML.
        fixed_by_weights: whether a training that continues from trained weights cannot change it.
        plan: plans of `kiln plan` that read it. gpu, tpu: it affects the step; run: it is a size.
        aka: names in other tools, as `rank lora_rank (KS): a note`; `TOOLS` in
            configs/explain_errors.py has the letters.
        field: arguments of pydantic's Field, such as ge.
    """
    facts: dict[str, Any] = {"not_in_key": not_in_key, "in_key_with": in_key_with, "needs": needs}
    facts |= {"fixed_by_weights": fixed_by_weights, "plan": plan.split()}
    facts["aka"] = [aka] if isinstance(aka, str) else [*aka]
    stated = {name: fact for name, fact in facts.items() if fact}
    return Field(default, json_schema_extra=stated, **field)


def facts_of(field: FieldInfo) -> dict[str, Any]:
    """What `setting` says of a field; facts at their defaults are absent."""
    facts = field.json_schema_extra
    return facts if isinstance(facts, dict) else {}


def settings_of(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted name and field of each setting of a section, and of the sections in it."""
    for name, field in section.model_fields.items():
        yield prefix + name, field
        for kind in _kinds(field.annotation):
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from settings_of(kind, f"{prefix}{name}.")


class Section(BaseModel, extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False):
    """A section of a recipe: unknown settings are errors, and values are immutable and finite."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """The schema with the string below each field as its description.

        pydantic's use_attribute_docstrings would parse the source at each start of a program.
        """
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for section in cls.__mro__[: cls.__mro__.index(Section)]:
            definition = ast.parse(inspect.getsource(section)).body[0]
            for field, below in pairwise(ast.iter_child_nodes(definition)):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                        properties[name].setdefault("description", inspect.cleandoc(text))
        return schema

    @model_validator(mode="before")
    @classmethod
    def _refuse_boolean_numbers(cls, settings: Any) -> Any:
        """Refuse true and false for a number, which pydantic would read as 1 and 0."""
        for name, value in settings.items() if isinstance(settings, dict) else ():
            if isinstance(value, bool) and name in cls.model_fields:
                kinds = _kinds(cls.model_fields[name].annotation)
                if not {int, float}.isdisjoint(kinds) and bool not in kinds:
                    raise ValueError(f"{name} must be a number, not {json.dumps(value)}")
        return settings

    @model_validator(mode="after")
    def _refuse_faults(self) -> Self:
        for fault in self.faults():
            raise ValueError(fault)
        return self

    def faults(self) -> Iterator[str]:
        """What is wrong with settings that are valid one by one, in words that name them."""
        return iter(())

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
                raise ValueError(  # an extended recipe may set it
                    f"{name} has no effect with {choice}: set it to {json.dumps(default)}, its "
                    "default, or change the other"
                )

    @classmethod
    def names_with(cls, fact: str, word: str | None = None) -> set[str]:
        """The settings with a fact from `setting`; if the fact is a list, with this word in it."""
        values = {name: facts_of(field).get(fact) for name, field in cls.model_fields.items()}
        return {name for name, value in values.items() if value and (word is None or word in value)}

    def key_settings(self) -> dict[str, Any]:
        """The settings that affect the result of the section's stage, as JSON."""
        return {
            name: section.key_settings()
            if isinstance(section := getattr(self, name), Section)
            else value
            for name, value in self.model_dump(mode="json").items()
            if self._is_in_key(facts_of(type(self).model_fields[name]))
        }

    def _is_in_key(self, facts: dict[str, Any]) -> bool:
        if condition := facts.get("in_key_with"):
            return not self._unmet(condition, self)
        return "not_in_key" not in facts

    def without_effect(
        self, recipe: Section | None = None, prefix: str = ""
    ) -> Iterator[tuple[str, str]]:
        """(dotted setting, what disables it) of each value that is not the default and is not used.

        Args:
            recipe: the section that dotted names start from; None: this section.
            prefix: name of this section, with a dot.
        """
        recipe = recipe or self
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            needs = facts_of(field).get("needs")
            disabled = needs and self._unmet(needs, recipe, prefix)
            if disabled and value != field.default:
                yield prefix + name, disabled
            elif isinstance(value, Section):
                yield from value.without_effect(recipe, f"{prefix}{name}.")

    def _unmet(self, condition: str, recipe: Section, prefix: str = "") -> str:
        """The values that do not meet a condition, as `train.method: full`; empty if it is met."""
        values = {}
        for term in condition.split(" or "):
            name, *comparison = term.split()
            is_own = name.partition(".")[0] in type(self).model_fields
            value = _value(self if is_own else recipe, name)
            if _is_met(value, *comparison):
                return ""
            values[prefix + name if is_own else name] = _as_yaml(value)
        return " and ".join(f"{name}: {value}" for name, value in values.items())


def _value(section: Any, dotted: str) -> Any:
    """A setting's value; None if a section on the way is null."""
    for name in dotted.split("."):
        section = None if section is None else getattr(section, name)
    return section


def _is_met(value: Any, sign: str = "", wanted: str = "") -> bool:
    return (_as_yaml(value) == wanted) == (sign == "==") if sign else bool(value)


def _as_yaml(value: Any) -> str:
    if isinstance(value, Section):
        return "{…}"
    return value if isinstance(value, str) else json.dumps(value)


def _kinds(annotation: Any) -> list[Any]:
    """The types that an annotation names, in unions and `Annotated` too."""
    return [annotation, *chain.from_iterable(map(_kinds, get_args(annotation)))]
