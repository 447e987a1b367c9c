"""YAML of recipes: each name once, text that UTF-8 can store, and no aliases."""

from __future__ import annotations

import re
from typing import Any

import yaml

#: Maximum depth of nested lists and mappings.
MOST_LEVELS = 50
_BOOLEAN = "tag:yaml.org,2002:bool"
#: What PyYAML raises for a value that is not of its type, such as 2026-13-45.
_INVALID = (ValueError, TypeError, KeyError, IndexError, AttributeError)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with the floats and booleans of YAML 1.2.

    1e-5 is a float, a commit such as 4e12345 is a string, and so are `no`, `yes`, `on` and `off`.
    It refuses what PyYAML drops in silence, or expands without bound.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's class attribute)
        first: [(tag, pattern) for tag, pattern in found if tag != _BOOLEAN]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
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
    """Quotes the strings that `_Loader` would read as floats."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d{1,3}$"),
        list("-+.0123456789"),
    )
_Loader.add_implicit_resolver(
    _BOOLEAN, re.compile("(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def parse_yaml(text: str) -> Any:
    """The value of a YAML document. Raises yaml.YAMLError."""
    try:
        return yaml.load(text, _Loader)
    except _INVALID as error:
        raise yaml.YAMLError(f"a value is not of its type: {error}") from None


def dump_yaml(value: Any) -> str:
    """A YAML document with the value of a JSON document, which `parse_yaml` reads back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _refused(why: str, place: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, why, place.start_mark)
