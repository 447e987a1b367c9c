"""Load recipes: a file, what it extends, dotted overrides, and the trials of a sweep.

YAML of recipes has each name once, text that UTF-8 can store, and no aliases. A recipe is found,
its `extends` resolved, and its overrides applied; then it is validated. A trial of a sweep is the
recipe with one combination of the swept values. The JSON schema of recipes is for editors and
docs/settings.md.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from configs.errors import Refused
from configs.explain_errors import explain, hint_of
from configs.secrets import is_secret, one_line, without_secrets
from configs.settings.recipe import Recipe, with_defaults_without_effect

#: Maximum depth of nested lists and mappings.
MOST_LEVELS = 50
_BOOLEAN, _INTEGER, _FLOAT = (f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float"))
_MERGE = "tag:yaml.org,2002:merge"
#: What PyYAML raises for a value that is not of its type, such as 2026-13-45 or "\UFFFFFFFF".
_INVALID = (ValueError, TypeError, LookupError, AttributeError, OverflowError)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with the numbers and booleans of YAML 1.2.

    1e-5 is a float and 0500 five hundred. A commit such as 4e12345 is a string, and so are 1:30,
    `no`, `yes`, `on` and `off`.
    It refuses what PyYAML drops in silence, or expands without bound.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's class attribute)
        first: [r for r in resolvers if r[0] not in (_BOOLEAN, _INTEGER, _FLOAT)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):  # a few lines of aliases expand to gigabytes
            raise _refused("aliases (*name) are not supported: repeat the value", self.peek_event())
        self._depth += 1
        if self._depth > MOST_LEVELS:
            raise _refused(f"it is nested more than {MOST_LEVELS} levels deep", self.peek_event())
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = set[str]()
        for key, _ in node.value:
            if key.tag == _MERGE:  # only an alias would give it a use
                raise _refused("merge keys (<<) are not supported: repeat the settings", key)
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    raise _refused(f"{key.value} is set twice", key)
                names.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: Any) -> Any:
        text = super().construct_scalar(node)
        if re.search("[\0\ud800-\udfff]", text):
            raise _refused("a character cannot be stored", node)
        return text


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that `_Loader` would read as numbers."""


def _integer(loader: _Loader, node: yaml.Node) -> int:
    text = loader.construct_scalar(node)
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


_NUMBERS = {
    _INTEGER: r"([-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+)$",
    _FLOAT: r"([-+]?(\.[0-9]+|[0-9][0-9_]*\.[0-9_]*)"
    r"|[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]{1,3}"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$",
}
for _kind in (_Loader, _Dumper):
    for _tag, _pattern in _NUMBERS.items():
        _kind.add_implicit_resolver(_tag, re.compile(_pattern), list("-+.0123456789"))
_Loader.add_constructor(_INTEGER, _integer)
_Loader.add_implicit_resolver(
    _BOOLEAN, re.compile("(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def parse_yaml(text: str) -> Any:
    """The value of a YAML document. Raises yaml.YAMLError."""
    try:
        return yaml.load(text, _Loader)
    except _INVALID as error:
        raise yaml.YAMLError(f"a value is not of its type: {error}") from None


def parse_option(text: str) -> Any:
    """The value of an option, as of `parse_yaml`; unquoted text has no comments: `a #2` is whole.

    Raises yaml.YAMLError.
    """
    value = parse_yaml(text)
    node = yaml.compose(text, _Loader)
    is_plain = node is None or (isinstance(node, yaml.ScalarNode) and node.style is None)
    rest = text if node is None else text[node.end_mark.index :]
    if is_plain and rest.strip():
        return parse_yaml(json.dumps(text.strip(), ensure_ascii=False))
    return value


def dump_yaml(value: Any, *, flow: bool = False) -> str:
    """A YAML document with the value of a JSON document, which `parse_yaml` reads back.

    Args:
        flow: each value of the mapping is in braces or brackets, on one line.
    """
    if not flow:
        return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    lines = []
    for name, item in value.items():
        inline = yaml.dump(
            [item],
            Dumper=_Dumper,
            sort_keys=False,
            allow_unicode=True,
            default_flow_style=True,
            width=math.inf,
        )
        lines.append(f"{name}: {inline.strip()[1:-1]}\n")
    return "".join(lines)


def _refused(why: str, place: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, why, place.start_mark)


RECIPES = Path(__file__).parent


def recipe_names() -> list[str]:
    """Names of the recipes in this package."""
    return sorted(p.stem for p in RECIPES.glob("*.yaml"))


def load_recipe(name: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Load a recipe.

    Args:
        name: a name of `recipe_names`, or a path that ends in .yaml or .yml.
        overrides: dotted setting, such as `train.steps` -> value.

    Raises:
        Refused: the recipe or a setting is unknown, or a value has the wrong type or range.
    """
    path = find_recipe(name)
    settings = _read(path, seen=())
    overrides = overrides or {}
    for dotted in overrides.keys() & {"source.kind", "train.epochs", "train.steps"}:
        section, setting = dotted.split(".")  # what these replace is not inherited
        settings = _merge(settings, {section: {setting: overrides[dotted]}}, "override ")
    named = {dotted.partition(".")[0] for dotted in overrides}
    if "sources" in named and "source" not in named:
        settings.pop("source", None)
    for dotted, value in overrides.items():
        name = dotted.rpartition(".")[2]
        _set(settings, dotted, anchored({name: value}, Path.cwd())[name])
    try:
        return Recipe.model_validate(settings)
    except ValidationError as error:
        leaves = list(_leaves(overrides))
        raise Refused(explain(path.name, error, settings, overridden=leaves)) from None


def _leaves(settings: Mapping[str, Any], section: str = "") -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{section}{name}.")
        else:
            yield f"{section}{name}"


def find_recipe(name: str) -> Path:
    """The file of a recipe, by name or path. Raises Refused if there is none."""
    is_path = name.endswith((".yaml", ".yml"))
    path = Path(name) if is_path else RECIPES / f"{name}.yaml"
    if os.path.isfile(path):  # Path.is_file raises for a name that is too long
        return path
    if is_path:
        raise Refused(f"recipe {name}: no such file")
    if os.path.isfile(f"{name}.yaml"):
        raise Refused(f"recipe {name}: not found (did you mean {name}.yaml?)")
    hint = hint_of(name, recipe_names())
    raise Refused(f"recipe {name}: not found ({hint}; or give a path ending in .yaml)")


def parse_override(text: str) -> tuple[str, Any]:
    """Split `train.steps=100` into the dotted setting and its YAML value. Raises Refused."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise Refused(f"override {text!r}: write it as key=value, such as train.steps=100")
    try:
        return key.strip(), parse_option(value)
    except yaml.YAMLError:
        raise Refused(f"override {key}: the value is not valid YAML") from None


def dump(recipe: Recipe) -> str:
    """The resolved recipe as YAML, complete except for secrets."""
    return dump_yaml(_redacted(json.loads(recipe.model_dump_json())))


def _redacted(value: Any, name: str = "") -> Any:
    """The value without secrets, because published cards contain the dump."""
    if isinstance(value, dict):
        return {key: _redacted(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_redacted(item, name) for item in value]
    if is_secret(name, value):
        return "..."
    return without_secrets(value) if isinstance(value, str) else value


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    path = path.resolve()
    if path in seen:
        raise Refused(f"{path.name}: `extends` forms a cycle")
    try:
        settings = parse_yaml(path.read_text(encoding="utf-8")) or {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        raise Refused(f"{path}{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Refused(f"{path}: not valid YAML: {one_line(error)}") from None
    except OSError as error:
        raise Refused(f"{path}: cannot be read: {error.strerror}") from None
    if not isinstance(settings, dict):
        raise Refused(f"{path.name}: a recipe is a mapping of settings")
    settings = anchored(settings, path.parent)
    parent = settings.pop("extends", None)
    if parent is None:
        return settings
    try:
        extended = find_recipe(str(parent))
    except Refused as error:
        beside = os.path.isfile(path.parent / str(parent))
        hint = f" (did you mean ./{parent}?)" if beside else ""
        raise Refused(f"{path.name}: extends: {error}{hint}") from None
    inherited = _read(extended, (*seen, path))
    inherited.pop("description", None)  # it is of the other recipe's model
    for name, other in (("source", "sources"), ("sources", "source")):
        if name in settings:  # a mixture replaces a single source, and the reverse
            inherited.pop(other, None)
    return _merge(inherited, settings, f"{path.name}: ")


def anchored(value: Any, folder: Path) -> Any:
    """Resolve strings that start with ./ or ../ by the folder of their recipe, ~/ by the user's.

    Prompts are left as they are.
    """
    if isinstance(value, dict):
        return {key: _anchored_item(key, item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [anchored(item, folder) for item in value]
    if isinstance(value, str) and value.startswith(("./", "../")):
        return str((folder / value).resolve())
    if isinstance(value, str) and value.startswith("~/"):
        return os.path.expanduser(value)
    return value


def _anchored_item(key: str, item: Any, folder: Path) -> Any:
    if key == "prompt":
        return item
    if key == "prompts" and isinstance(item, list):  # a prompt with references is a mapping
        return [each if isinstance(each, str) else anchored(each, folder) for each in item]
    return anchored(item, folder)


def _merge(base: dict[str, Any], over: dict[str, Any], where: str) -> dict[str, Any]:
    """`base` with the values of `over`, section by section.

    Args:
        where: the start of an error: the file or override, and the section.
    """
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and not _replaces(key, old, value):
            if old and not value:
                raise Refused(
                    f"{where}{key}: {{}} changes nothing of {', '.join(map(str, old))}: remove it, "
                    "or set what it shall change"
                )
            value = _merge(_inherited(key, old, value), value, f"{where}{key}.")
        merged[key] = value
    return merged


def _inherited(section: str, old: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The old section without `train.epochs` if `train.steps` is new, and the reverse."""
    lengths = {name for name in ("steps", "epochs") if new.get(name) is not None}
    if section != "train" or len(lengths) != 1:
        return old
    return {name: value for name, value in old.items() if name not in {"steps", "epochs"} - lengths}


def _replaces(section: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether a section takes nothing from the old section: a source of another kind."""
    return section == "source" and new.get("kind", old.get("kind")) != old.get("kind")


def _set(settings: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for depth, part in enumerate(parents):
        if settings.get(part) is None:  # absent, or null as in a resolved recipe
            settings[part] = {}
        settings = settings[part]
        if not isinstance(settings, dict):
            where = ".".join(parents[: depth + 1])
            raise Refused(f"override {dotted}: {where} is a value, not a section")
    section = "".join(f"{name}." for name in parents)
    settings.update(_merge({last: settings.get(last)}, {last: value}, f"override {section}"))


class Trial(NamedTuple):
    """One combination of values, and the recipe with them."""

    settings: dict[str, Any]  # dotted setting -> value
    recipe: Recipe

    @property
    def label(self) -> str:
        """The values in short: learning_rate=0.0001 lora.rank=8."""
        return " ".join(
            f"{name.removeprefix('train.')}={json.dumps(value)}"
            for name, value in self.settings.items()
        )


def load_retrained(name: str, overrides: Mapping[str, Any]) -> Recipe:
    """A recipe that can be retrained. Raises Refused as load_recipe, and for one that cannot."""
    recipe = load_recipe(name, overrides)
    if recipe.has_references:
        raise Refused(
            "a retraining selects no references, so an edit model would be trained without them: "
            "run the recipe with `kiln run`, which encodes only what is new",
            setting="source",
        )
    if recipe.sources and recipe.retrain.start == "champion":
        why = "a mixture is trained again from the base's weights: set base"
        raise Refused(why, setting="retrain.start")
    return recipe


def load_trials(name: str, overrides: Mapping[str, Any]) -> list[Trial]:
    """The trials of a recipe's section `sweep`, in the order of the grid.

    Args:
        name: name or path of a recipe.
        overrides: dotted setting -> value, as of load_recipe; they may contain `sweep.values`.

    Raises:
        Refused: the recipe or a trial is invalid, or two trials train equal weights.
    """
    values = load_recipe(name, overrides).sweep.values
    if not values:
        raise Refused(
            f"recipe {name}: nothing to sweep: set sweep.values, or add `--set "
            "train.learning_rate=1e-4,3e-5`"
        )
    trials = []
    known = dict[str, Trial]()
    for combination in product(*values.values()):
        settings = dict(zip(values, combination, strict=True))
        trial = Trial(settings, load_recipe(name, {**overrides, **settings}))
        used = with_defaults_without_effect(trial.recipe)
        keys = [used.train.key_settings()]
        if used.caption is not None:
            keys.append(used.caption.key_settings() | {"model": used.caption.model})
        same = known.setdefault(json.dumps(keys), trial)
        if same is not trial:
            raise Refused(f"sweep: {same.label} and {trial.label} train equal weights")
        trials.append(trial)
    return trials


def add_values(overrides: Mapping[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """Overrides whose `sweep.values` have those of options `--set` too, as parse_values reads each.

    Raises Refused, also for a setting that is named twice.
    """
    grid: dict[str, list[Any]] = {}
    for name, values in map(parse_values, texts):
        if name in grid:
            raise Refused(f"--set {name} is given twice: write {name}=value,value")
        grid[name] = values
    swept = overrides.get("sweep.values", {})
    if not grid or not isinstance(swept, dict):  # load_trials refuses what is no mapping
        return {**overrides}
    return {**overrides, "sweep.values": swept | grid}


def parse_values(text: str) -> tuple[str, list[Any]]:
    """Split `train.lora.rank=4,8` into the dotted setting and its values. Raises Refused."""
    name, sign, values = text.partition("=")
    try:
        parsed = parse_yaml(f"[{values}]")
    except yaml.YAMLError:
        parsed = None
    if not sign or not name.strip() or not isinstance(parsed, list):
        raise Refused(f"--set {text!r}: write it as key=value,value")
    return name.strip(), parsed


CHECKOUT = Path(__file__).parents[1]


def json_schema() -> dict[str, Any]:
    """The JSON schema of a recipe file, for editors.

    Nothing but a source's kind is required, because `extends` can set everything else.
    """
    schema = Recipe.model_json_schema()
    schema["properties"]["extends"] = {"type": "string", "description": "Recipe to start from."}
    for section, name in (("Evaluate", "prompts"), ("Sweep", "values")):
        named = schema["$defs"][section]["properties"][name]
        named["additionalProperties"] = {"anyOf": [named["additionalProperties"], {"type": "null"}]}
    for section in (schema, *schema["$defs"].values()):
        required = section.pop("required", [])
        if "kind" in required:  # it selects the settings of a source
            section["required"] = ["kind"]
    return schema
