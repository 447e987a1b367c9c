"""YAML of recipes: each name once, text that UTF-8 can store, and no aliases."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

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
        first: [one for one in found if one[0] not in (_BOOLEAN, _INTEGER, _FLOAT)]
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
    found = parse_yaml(text)
    node = yaml.compose(text, _Loader)
    is_plain = node is None or (isinstance(node, yaml.ScalarNode) and node.style is None)
    rest = text if node is None else text[node.end_mark.index :]
    if is_plain and rest.strip():
        return parse_yaml(json.dumps(text.strip(), ensure_ascii=False))
    return found


def dump_yaml(value: Any) -> str:
    """A YAML document with the value of a JSON document, which `parse_yaml` reads back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _refused(why: str, place: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, why, place.start_mark)
