"""Faults of one line in the project's own code, each with the tests that must catch it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("faults.yaml")


class NotThere(ValueError):
    """A fault's line is not in its file, or more than once."""


@dataclass(frozen=True)
class Fault:
    """What is broken, and how.

    Attributes:
        line: the whole line that is replaced, without its indentation.
        instead: what stands there then, indented alike.
        caught_by: ids of tests, one of which must fail.
        within: the function or class that the line is in, where another has the same line.
    """

    fault: str
    file: str
    line: str
    instead: str
    caught_by: tuple[str, ...]
    within: str | None = None

    def planted(self, source: str) -> str:
        """The file's text with the fault. Raises NotThere."""
        lines = source.splitlines(keepends=True)
        first, last = _span(source, self.within) if self.within else (1, len(lines))
        found = [n for n in range(first - 1, last) if lines[n].strip() == self.line]
        if len(found) != 1:
            raise NotThere(f"{self.file} has this line {len(found)} times: {self.line}")
        old = lines[found[0]]
        indent = old[: len(old) - len(old.lstrip())]
        lines[found[0]] = "".join(f"{indent}{new}\n" for new in self.instead.splitlines())
        return "".join(lines)


def read_faults() -> list[Fault]:
    """All of them, in the order of the list."""
    listed = yaml.safe_load(LIST.read_text(encoding="utf-8"))
    return [Fault(**{**given, "caught_by": tuple(given["caught_by"])}) for given in listed]


def _span(source: str, name: str) -> tuple[int, int]:
    """First and last line of a function or class, by its name or as Class.method."""
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        found = [n for n in ast.walk(node) if isinstance(n, kinds) and n.name == part]
        if len(found) != 1:
            raise NotThere(f"{name} is there {len(found)} times")
        node = found[0]
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    return node.lineno, node.end_lineno or node.lineno
