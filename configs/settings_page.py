"""docs/settings.md, from the schema of a recipe. `python -m configs.settings_page` prints it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from configs.settings.generate import Generate
from configs.settings.recipe import Recipe

Node = dict[str, Any]
HEAD = """# Settings

All settings of a recipe, with their types, defaults and units. [recipes.md](recipes.md) explains
the sections. `kiln recipes NAME` prints the values of a recipe. `python -m configs.settings_page`
prints this page from the schema in `configs/`.

* The first column is the name after `-o`, such as `-o train.steps=100`.
* `NAME` and `N` stand for a name of yours and a position in a list.
* A section whose default is null is absent until one of its settings is given.
* `key`: `yes` if a change of the setting builds its stage anew, else why no key has it. `content`:
  keys have a digest of what it names; `execution`: it changes how a stage runs; `limit`: it ends or
  refuses a run; `destination`: it says where results go; `label`: it is a name for people;
  `command`: one command alone reads it.
"""
LIMITS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
#: Settings of `kiln generate` that are arguments of the command.
ARGUMENTS = ("model", "prompts")
PLAIN = {"boolean": "true or false", "object": "mapping"}


def page() -> str:
    """The text of docs/settings.md."""
    parts = [HEAD]
    for title, about, rows in (*_tables(Recipe.model_json_schema()), _generate_table()):
        lines = [f"## {title}", "", *([about, ""] if about else [])]
        lines += ["| setting | type | default | key | description |", "|---|---|---|---|---|"]
        parts.append("\n".join([*lines, *rows]) + "\n")
    return "\n".join(parts)


def _tables(schema: Node) -> Iterator[tuple[str, str, list[str]]]:
    """Title, description and rows of each table: the recipe itself, then one per section."""
    definitions = schema["$defs"]
    nodes = schema["properties"]
    own = [name for name, node in nodes.items() if not any(_sections(node, definitions))]
    yield "The recipe", "", [_row(name, nodes[name], name == "name", {}) for name in own]
    for name, node in nodes.items():
        for section in _sections(node, definitions):
            kind = section["properties"].get("kind", {}).get("const")
            title = f"`{name}`" + (f", `kind: {kind}`" if kind else "")
            prefix = f"{name}.NAME." if "additionalProperties" in node else f"{name}."
            rows = list(_rows(prefix, section, definitions, node))
            yield title, _sentence(section), rows


def _generate_table() -> tuple[str, str, list[str]]:
    """As of `_tables`; without what are arguments of the command."""
    schema = Generate.model_json_schema()
    rows = _rows("", schema, schema.get("$defs", {}))
    about = (
        "The settings of `kiln generate MODEL PROMPT`, such as `-o seed=7`; no part of a recipe."
    )
    return "`kiln generate`", about, [row for row in rows if row.split("`")[1] not in ARGUMENTS]


def _rows(
    prefix: str, section: Node, definitions: Node, parent: Node | None = None
) -> Iterator[str]:
    """The rows of a section; those of the sections in it follow where it is.

    Args:
        parent: the setting that holds it; if that is in no key, neither are those of the section.
    """
    required = section.get("required", ())
    for name, node in section["properties"].items():
        inner = list(_sections(node, definitions))
        if not inner or "anyOf" in node.get("items", {}):
            yield _row(prefix + name, node, name in required, parent or {})
        for part in inner:
            step = "." if "$ref" in node or "anyOf" in node else ".N."
            step = ".NAME." if "additionalProperties" in node else step
            yield from _rows(prefix + name + step, part, definitions, {**(parent or {}), **node})


def _sections(node: Node, definitions: Node) -> Iterator[Node]:
    """The sections that a setting can hold: a section, null, or a list or mapping of sections."""
    if "$ref" in node:
        definition = definitions[node["$ref"].rpartition("/")[2]]
        if "properties" in definition:
            yield definition
    for choice in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from _sections(choice, definitions)
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            yield from _sections(node[key], definitions)


def _row(name: str, node: Node, required: bool, parent: Node) -> str:
    empty: Any = {} if node.get("type") == "object" else None  # without a default in the schema
    default = "required" if required else f"`{_written(node.get('default', empty))}`"
    key = _key(node if "not_in_key" in node else parent)
    cells = (f"`{name}`", _type(node), default, key, _sentence(node))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _written(value: Any) -> str:
    """A value as a recipe has it."""
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value or '""'


def _key(node: Node) -> str:
    """Whether keys have a setting, or why not."""
    condition = f", yes if `{node['in_key_with']}`" if "in_key_with" in node else ""
    return f"{node['not_in_key']}{condition}" if "not_in_key" in node else "yes"


def _sentence(node: Node) -> str:
    needs = f" Needs `{node['needs']}`." if "needs" in node else ""
    return " ".join(node.get("description", "").split()) + needs


def _type(node: Node) -> str:
    """The values of a setting, in words."""
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(_type(choice) for choice in node["anyOf"]))
    if "$ref" in node:
        return "section"
    if "const" in node:
        return f"`{node['const']}`"
    if "enum" in node:
        return ", ".join(f"`{value}`" for value in node["enum"])
    kind = node.get("type", "any")
    if kind == "array":
        each = node.get("items") or {}
        fixed = node.get("prefixItems")
        return f"{len(fixed)} values" if fixed else f"list of {_type(each)}"
    limits = [f"{sign} {node[key]:g}" for key, sign in LIMITS.items() if key in node]
    return " ".join([PLAIN.get(kind, str(kind)), ", ".join(limits)]).strip()


if __name__ == "__main__":
    print(page(), end="")
