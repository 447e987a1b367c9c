"""Faults of one line in the project's own code, each with the tests that must catch it."""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
LIST = Path("tests/faults/faults.yaml")  # below the root of a checkout
#: Environment variable: the commit before a change. Unset: see `previous_commit`.
BASE = "KILN_FAULTS_BASE"
#: Seconds that a change takes: no clone of the main branch marks where it began.
SESSION = 3 * 3600
#: A change has this part of the faults that it does not concern planted.
PARTS = 8
#: A change plants about this many at most, since 1,000 take up to an hour of CI.
MOST = 100


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


def read_faults(text: str | None = None) -> list[Fault]:
    """All of them, in the order of the list or of another text of it."""
    text = (ROOT / LIST).read_text(encoding="utf-8") if text is None else text
    rows = yaml.load(text, yaml.CSafeLoader) or []
    return [Fault(**{**row, "caught_by": tuple(row["caught_by"])}) for row in rows]


def previous_commit(root: Path) -> str:
    """The main branch before the change that HEAD ends; empty if the clone has no such commit.

    Without KILN_FAULTS_BASE it is the newest first parent that is three hours older than HEAD.
    """
    if base := os.environ.get(BASE):
        return base
    last = int(_git(root, "show", "--no-patch", "--format=%ct", "HEAD"))
    return _git(root, "rev-list", "-1", "--first-parent", f"--before={last - SESSION}", "HEAD")


def faults_of_change(faults: Sequence[Fault], root: Path = ROOT) -> list[Fault]:
    """The faults whose file, tests or row changed, and an eighth of the others.

    HEAD's digest selects the eighth, and which are left out if they are more than MOST. All of them
    if the clone lacks the commit before the change.
    """
    base = previous_commit(root)
    if not base:
        return list(faults)
    changed = set(_git(root, "diff", "--name-only", base).splitlines())
    listed = _git(root, "ls-tree", "--name-only", base, str(LIST))
    before = set(read_faults(_git(root, "show", f"{base}:{listed}")) if listed else [])
    concerned: list[Fault] = []
    others: list[Fault] = []
    for fault in faults:
        files = {fault.file, *(test.partition("::")[0] for test in fault.caught_by)}
        untouched = fault in before and changed.isdisjoint(files)
        (others if untouched else concerned).append(fault)
    number = int(_git(root, "rev-parse", "HEAD")[:8], 16)
    planted = [*concerned, *others[number % PARTS :: PARTS]]
    every = -(-len(planted) // MOST) or 1
    return planted[number % every :: every]


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def _named(nodes: Iterable[ast.AST], name: str) -> list[ast.AST]:
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [node for node in nodes if isinstance(node, kinds) and node.name == name]


def _span(source: str, name: str) -> tuple[int, int]:
    """First and last line of a function or class, by its name or as Class.method."""
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        own = _named(ast.iter_child_nodes(node), part)
        named = own or _named(ast.walk(node), part)
        if len(named) != 1:
            raise NotThere(f"{name} is there {len(named)} times")
        node = named[0]
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    return node.lineno, node.end_lineno or node.lineno
