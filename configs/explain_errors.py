"""Explain wrong settings in the recipe's terms, with the nearest right name.

A validation error of pydantic becomes file, dotted setting and remedy. For a setting's name of
diffusers' scripts, kohya's sd-scripts or SimpleTuner, the error contains our name: a field's `aka`
lists theirs. `python -m configs.explain_errors` prints these names as docs/coming-from.md.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from configs.secrets import without_secrets
from configs.settings import data
from configs.settings.base_section import facts_of, settings_of
from configs.settings.recipe import Recipe

#: Most names that a hint suggests.
SUGGESTED = 3
#: From this similarity on, a name is a known name with a typing error.
TYPO = 0.85
#: Kind of a source -> its settings.
SOURCES: dict[str, type[BaseModel]] = {
    get_args(source.model_fields["kind"].annotation)[0]: source
    for source in get_args(get_args(data.Source)[0])
}


def hint_of(name: str, known: Collection[str], prefix: str = "") -> str:
    """`did you mean ...?` with the most similar known names, or `there are: ...` with all.

    Args:
        prefix: what precedes a similar name, such as the section of a setting.
    """
    near = similar_names(name, known)
    return did_you_mean(f"{prefix}{n}" for n in near) or f"there are: {', '.join(known)}"


def similar_names(name: str, known: Collection[str]) -> list[str]:
    """The known names that a wrong name may mean; none without a similar one."""
    return (
        difflib.get_close_matches(name, known, n=1, cutoff=TYPO)
        or longer_names(name, known)
        or _misspelt_names(name, known)
    )


def longer_names(name: str, known: Collection[str]) -> list[str]:
    """Names with all words of `name`, such as num_inference_steps for steps; few, or none."""
    words = _words(name)
    names = [other for other in known if words <= _words(other)]
    return names if len(names) <= SUGGESTED else []


def _misspelt_names(name: str, known: Collection[str]) -> list[str]:
    """The most similar name, or those with the most similar word, such as `steps` for `stepz`."""
    words = {word for other in known for word in _words(other)}
    near = difflib.get_close_matches(name, words.union(known), n=1)
    return [other for other in near if other in known] or [
        other for word in near for other in longer_names(word, known)
    ]


def did_you_mean(names: Iterable[str]) -> str:
    """`did you mean a or b?`; empty without a name."""
    choices = " or ".join(names)
    return f"did you mean {choices}?" if choices else ""


def _words(name: str) -> set[str]:
    return set(re.split(r"[_/.-]", name.lower()))


@dataclass(frozen=True)
class Foreign:
    """A setting of another tool, with our equivalent."""

    names: str  # one or more, separated by spaces
    tools: str  # letters of TOOLS
    ours: str  # dotted setting or section; "none" without an equivalent
    note: str = ""

    @property
    def hint(self) -> str:
        """A hint for an error: our name of the setting."""
        if self.ours == "none":
            return f"no equivalent here: {self.note}"
        return f"called {self.ours} here" + (f": {self.note}" if self.note else "")


#: Settings of other tools without an equivalent, as `aka` of `setting` has the others.
NO_EQUIVALENT = (
    "variant (DS): a part without plain weights is read from its variant",
    "caption_extension (K): the caption of `fox.png` is in `fox.txt`",
    "scale_lr (D): learning_rate is not scaled",
    "resume_from_checkpoint resume (DKS): runs resume automatically",
    "token_warmup_step (K): the tags of captions do not depend on the step",
    "keep_tokens_separator (K): `encode.captions.keep_tags` counts the first tags",
    "secondary_separator enable_wildcard (K): write such captions out",
    "multires_noise_iterations multires_noise_discount (K): `train.noise_offset` is there",
)
TOOLS = {
    "D": "diffusers",
    "K": "kohya",
    "O": "OneTrainer",
    "P": "PyTorch",
    "S": "SimpleTuner",
    "T": "transformers",
}


def _table() -> Iterator[Foreign]:
    settings = [(name, facts_of(field).get("aka", ())) for name, field in settings_of(Recipe)]
    for ours, texts in (*settings, ("none", NO_EQUIVALENT)):
        for text in texts:
            names, _, rest = text.partition(" (")
            tools, _, note = rest.partition(")")
            yield Foreign(names, tools, ours, note.removeprefix(": "))


TABLE = tuple(_table())

#: Setting and value of another tool -> our equivalent.
VALUES = {
    ("train.lr_scheduler", "constant_with_warmup"): "constant here, with train.lr_warmup_steps",
    ("train.lr_scheduler", "cosine_with_min_lr"): "cosine here, with train.lr_min_ratio",
    ("evaluate.scheduler", "euler_a"): "euler_ancestral here",
    ("train.optimizer", "AdamW8bit"): "adamw_8bit here",
    ("train.optimizer", "AdamW"): "adamw here",
    ("train.optimizer", "Adafactor"): "adafactor here",
    ("train.optimizer", "AdamWScheduleFree"): "adamw_schedule_free here",
    ("train.optimizer", "CAME"): "came here",
    ("train.optimizer", "Lion"): "lion here",
    ("train.optimizer", "Lion8bit"): "lion_8bit here",
    ("train.optimizer", "Muon"): "muon here",
    ("train.optimizer", "Prodigy"): "prodigy here",
}


def page() -> str:
    """The text of docs/coming-from.md."""
    lines = [
        "# Coming from diffusers, kohya or SimpleTuner",
        "",
        "Settings of these tools and their names in Kilnworks. The error for one of them in a",
        "recipe contains our name. `python -m configs.explain_errors` prints this page.",
        "",
        "These commands write a recipe, whose head lists the settings without equivalent:",
        "",
        "```",
        ".venv/bin/kiln import kohya dataset.toml train.toml --output mine.yaml",
        ".venv/bin/kiln import diffusers accelerate launch train_text_to_image_lora.py --rank=8 …",
        ".venv/bin/kiln import simpletuner config/ --output mine.yaml",
        "```",
        "",
        "kohya's dataset may be a folder of folders `10_name class`, its training settings a",
        "command line. The base draws class pictures that are missing (`source.kind: drawn`).",
        "",
        "| their setting | tool | our setting | note |",
        "|---|---|---|---|",
    ]
    for foreign in TABLE:
        theirs = ", ".join(f"`{name}`" for name in foreign.names.split())
        tools = ", ".join(TOOLS[tool] for tool in foreign.tools)
        here = "none" if foreign.ours == "none" else f"`{foreign.ours}`"
        lines.append(f"| {theirs} | {tools} | {here} | {foreign.note} |")
    return "\n".join(lines) + "\n"


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
    faults: dict[Any, ErrorDetails] = {}
    for item in error.errors():
        path = tuple(_path(item, settings))
        is_choice = len(path) < len(item["loc"]) and not isinstance(item["input"], dict)
        key = path if is_choice else (path, item["type"], item["msg"])
        text = _EXPECTED.get(item["type"], item["msg"])
        if key in faults and is_choice:
            first = faults[key]
            text = f"{_EXPECTED.get(first['type'], first['msg'])}, or {text}"
            item = {**first, "type": "union", "msg": text}
        faults[key] = {**item, "loc": path}
    return [item for item in faults.values() if not _is_told_better(item, faults.values())]


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
        kinds = item["ctx"]["expected_tags"].replace("'", "").split(", ")
        tag = item["ctx"]["tag"]
        return f"{dotted}.kind: {tag!r} is unknown ({hint_of(tag, kinds)})"
    message = _EXPECTED.get(item["type"]) or item["msg"].removeprefix("Value error, ")
    of_text = item["type"] in ("string_pattern_mismatch", "string_type")
    if of_text and (examples := _examples(where, model)):
        message = f"it takes a text such as {' or '.join(examples)}"
    if item["type"] == "value_error" and isinstance(item["input"], dict):
        # A validator of a whole section: its message names the settings.
        return f"{dotted}: {message}" if dotted else message
    value = item["input"]
    if isinstance(value, str) and item["type"] == "literal_error" and (dotted, value) in VALUES:
        return f"{dotted}: {value!r} is {VALUES[dotted, value]}"
    got = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    near = _near_choice(item) if item["type"] == "literal_error" else ""
    return f"{dotted}: {message} (got {got}{near})"  # as YAML has it: null, true


def _examples(where: list[str], model: type[BaseModel]) -> list[str]:
    """The examples of a setting, which say more than its pattern."""
    *sections, name = where
    inner: type[BaseModel] | None = model
    for part in sections:
        field = None if inner is None else inner.model_fields.get(part)
        inner = None if field is None else _section(field.annotation)
    field = None if inner is None else inner.model_fields.get(name)
    return [] if field is None else field.examples or []


def _near_choice(item: ErrorDetails) -> str:
    """A hint of the most similar choice, for another spelling or a scheduler's class."""
    known = re.findall("'([^']+)'", item["ctx"]["expected"])
    name = str(item["input"]).lower().removesuffix("scheduler")
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"; {did_you_mean(near)}" if near else ""


def _hint(where: list[str], settings: dict[str, Any], model: type[BaseModel]) -> str:
    """The setting that an unknown name may mean: in its section, in another tool, or elsewhere.

    Args:
        where: the parts of its dotted name.
    """
    *section, name = where
    if section == ["source"] and (kinds := _kinds_with(name)):
        return f"of source.kind {kinds}; this one is {settings['source']['kind']}"
    known = _field_names(section, settings, model)
    prefix = "".join(f"{s}." for s in section)
    if name in known:  # a setting of another kind of source
        return hint_of(name, known, prefix)
    theirs = next((foreign for foreign in TABLE if name in foreign.names.split()), None)
    if theirs is not None and theirs.ours != prefix + name:
        own = prefix + theirs.ours.rpartition(".")[2]
        is_here = own != theirs.ours and own.removeprefix(prefix) in known
        return did_you_mean([own]) if is_here else theirs.hint
    elsewhere = [name] if section and name in model.model_fields else []
    for part, field in model.model_fields.items():
        kind = _section(field.annotation)
        elsewhere += [f"{part}.{name}"] if kind and name in kind.model_fields else []
    if longer_names(name, known) or section[:1] == ["source"] or (section and len(elsewhere) > 1):
        elsewhere = []
    return did_you_mean(elsewhere) or hint_of(name, known, prefix)


def _field_names(
    path: list[str], settings: dict[str, Any], model: type[BaseModel] | None
) -> list[str]:
    for depth, part in enumerate(path):
        if model is None:
            return []
        if part == "source" and depth == 0:  # deeper, a set of prompts may have this name
            source = settings.get("source")
            model = SOURCES.get(str(source.get("kind"))) if isinstance(source, dict) else None
        elif part in model.model_fields:
            model = _section(model.model_fields[part].annotation)
    return sorted(model.model_fields) if model is not None else []


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section of a field, which may also be null or have named sections."""
    kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    return next((kind for kind in kinds if issubclass(kind, BaseModel)), None)


def _kinds_with(name: str) -> str:
    """The kinds of source that have a setting."""
    kinds = [kind for kind, source in SOURCES.items() if name in source.model_fields]
    return ", ".join(kinds[:-1]) + " or " * (len(kinds) > 1) + "".join(kinds[-1:])


if __name__ == "__main__":
    print(page(), end="")
