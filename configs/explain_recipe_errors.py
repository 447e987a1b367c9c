"""Explain a validation error of pydantic in the recipe's terms: file, dotted setting, remedy."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from configs import coming_from
from configs.nearest_name import did_you_mean, hint_of, longer_names
from configs.redact_urls import without_secrets
from configs.settings import source
from configs.settings.recipe import Recipe

#: Type of pydantic's error -> what YAML the setting takes.
_EXPECTED = {
    **dict.fromkeys(("tuple_type", "list_type"), "it takes a list, such as [a, b]"),
    **dict.fromkeys(("dict_type", "model_type"), "it takes a section, such as {name: value}"),
    "model_attributes_type": "it takes a section, such as {kind: folder, path: ./pictures}",
    "float_parsing": "it takes a number without a unit, such as 0.1 for 10%",
    "int_parsing": "it takes a whole number without a unit",
    "invalid_key": "no setting is a number; write a decimal with a point, such as 0.15",
}


def explain(
    where: str,
    error: ValidationError,
    settings: dict[str, Any],
    model: type[BaseModel] = Recipe,
    overridden: Collection[str] = (),
) -> str:
    """A validation error as text: one line per fault, with similar names of settings.

    Args:
        where: the file or flow with the settings; it starts each line.
        settings: the validated values.
        model: the class they were validated with.
        overridden: dotted settings whose values are not those of `where`.
    """
    items = _by_setting(error, settings)
    lacking = [str(item["loc"][0]) for item in items if _is_missing_section(item, model)]
    lines = [
        _origin(item, where, overridden) + _explain_one(item, settings, model)
        for item in items
        if item["loc"][:1] not in [(name,) for name in lacking]
    ]
    if lacking:
        begin = "begin with `extends: NAME`, such as sdxl-lora (`kiln recipes` lists them)"
        lines.insert(0, f"{where}: it lacks {', '.join(lacking)}: {begin}")
    return without_secrets("\n".join(dict.fromkeys(lines)))


def _is_missing_section(item: ErrorDetails, model: type[BaseModel]) -> bool:
    is_missing = item["type"] == "missing" and len(item["loc"]) == 1
    return is_missing and _section(model.model_fields[str(item["loc"][0])].annotation) is not None


def _by_setting(error: ValidationError, settings: dict[str, Any]) -> list[ErrorDetails]:
    """The faults, with the path in the file as `loc`; one for all that a setting may be instead."""
    found: dict[Any, ErrorDetails] = {}
    for item in error.errors():
        path = tuple(_path(item, settings))
        is_choice = len(path) < len(item["loc"]) and not isinstance(item["input"], dict)
        key = path if is_choice else (path, item["type"], item["msg"])
        text = _EXPECTED.get(item["type"], item["msg"])
        if key in found and is_choice:
            first = found[key]
            text = f"{_EXPECTED.get(first['type'], first['msg'])}, or {text}"
            item = {**first, "type": "union", "msg": text}
        found[key] = {**item, "loc": path}
    return [item for item in found.values() if not _is_told_better(item, found.values())]


def _is_told_better(item: ErrorDetails, others: Collection[ErrorDetails]) -> bool:
    """Whether a section or list that could be a word has faults of its own."""
    if item["type"] != "literal_error" or not isinstance(item["input"], dict | list):
        return False
    where = item["loc"]
    return any(other is not item and other["loc"][: len(where)] == where for other in others)


def _path(item: ErrorDetails, settings: dict[str, Any]) -> list[str | int]:
    """The path of a fault in the file, without the members of unions, which pydantic adds."""
    path: list[str | int] = []
    value: Any = settings
    for part in item["loc"]:
        inside = range(len(value)) if isinstance(value, list | tuple) else value
        if isinstance(inside, range | dict) and part in inside:
            value = value[part]
            path.append(part)
    return [*path, item["loc"][-1]] if item["type"] == "missing" else path


def _origin(item: ErrorDetails, where: str, overridden: Collection[str]) -> str:
    """The start of a line: a value comes from the file, an override, or a section from both."""
    path = ".".join(map(str, item["loc"]))
    if any(f"{path}.".startswith(f"{name}.") for name in overridden):
        return "override "
    if not any(name.startswith(f"{path}." if path else "") for name in overridden):
        return f"{where}: "
    return "override " if item["type"] == "extra_forbidden" else f"{where} with overrides: "


def _explain_one(item: ErrorDetails, settings: dict[str, Any], model: type[BaseModel]) -> str:
    where = [str(part) for part in item["loc"]]
    dotted = ".".join(where)
    if item["type"] == "extra_forbidden":
        return f"{dotted}: unknown setting ({_hint(where, settings, model)})"
    if item["type"] == "missing":
        return f"{dotted}: missing; it must be set"
    if item["type"] == "union_tag_invalid":
        kinds, tag = item["ctx"]["expected_tags"].replace("'", "").split(", "), item["ctx"]["tag"]
        return f"{dotted}.kind: {tag!r} is unknown ({hint_of(tag, kinds)})"
    message = _EXPECTED.get(item["type"]) or item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error" and isinstance(item["input"], dict):
        # A validator of a whole section: its message names the settings.
        return f"{dotted}: {message}" if dotted else message
    value = item["input"]
    if item["type"] == "literal_error" and (hint := coming_from.value_hint(dotted, value)):
        return f"{dotted}: {value!r} is {hint}"
    got = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    near = _near_choice(item) if item["type"] == "literal_error" else ""
    return f"{dotted}: {message} (got {got}{near})"  # as YAML has it: null, true


def _near_choice(item: ErrorDetails) -> str:
    """A hint of the most similar choice, for another spelling or a scheduler's class."""
    known = re.findall("'([^']+)'", item["ctx"]["expected"])
    name = str(item["input"]).lower().removesuffix("scheduler")
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"; {did_you_mean(near)}" if near else ""


def _hint(where: list[str], settings: dict[str, Any], model: type[BaseModel]) -> str:
    """The setting that an unknown one may be: of its section first, of another tool, or elsewhere.

    Args:
        where: the parts of its dotted name.
    """
    *section, name = where
    if section == ["source"] and (kinds := _kinds_with(name)):
        kind = (settings.get("source") or {}).get("kind")
        return f"of source.kind {kinds}; this one is {kind}"
    known, prefix = _field_names(section, settings, model), "".join(f"{s}." for s in section)
    if name in known:  # of another kind of source
        return hint_of(name, known, prefix)
    if (theirs := coming_from.ours(name)) is not None and theirs.ours != prefix + name:
        own = prefix + theirs.ours.rpartition(".")[2]
        is_here = own != theirs.ours and own.removeprefix(prefix) in known
        return did_you_mean([own]) if is_here else coming_from.hint(theirs)
    elsewhere = [name] if section and name in model.model_fields else []
    elsewhere += [f"{part}.{name}" for part in _sections_with(name, model)]
    if longer_names(name, known) or section[:1] == ["source"] or (section and len(elsewhere) > 1):
        elsewhere = []
    return did_you_mean(elsewhere) or hint_of(name, known, prefix)


def _sections_with(name: str, model: type[BaseModel]) -> list[str]:
    sections = {part: _section(field.annotation) for part, field in model.model_fields.items()}
    return [part for part, one in sections.items() if one and name in one.model_fields]


def _field_names(
    path: list[str], settings: dict[str, Any], model: type[BaseModel] | None
) -> list[str]:
    for part in path:
        if model is None:
            return []
        if part == "source":
            kind = (settings.get("source") or {}).get("kind")
            model = _source_model(kind)
        elif part in model.model_fields:
            model = _section(model.model_fields[part].annotation)
    return sorted(model.model_fields) if model is not None else []


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section of a field, also of one that may be null, and of named sections."""
    kinds = [one for one in (annotation, *get_args(annotation)) if isinstance(one, type)]
    return next((one for one in kinds if issubclass(one, BaseModel)), None)


def _kinds_with(name: str) -> str:
    """The kinds of source that have a setting."""
    fields = [model.model_fields for model in get_args(get_args(source.Source)[0])]
    found = [get_args(one["kind"].annotation)[0] for one in fields if name in one]
    return ", ".join(found[:-1]) + " or " * (len(found) > 1) + "".join(found[-1:])


def _source_model(kind: str | None) -> type[BaseModel] | None:
    models = get_args(get_args(source.Source)[0])
    return next((m for m in models if kind in get_args(m.model_fields["kind"].annotation)), None)
