"""docs/troubleshooting.md, from the errors in the code.

`python -m flows.error_messages_page` prints it. The code is read, not run. A placeholder such as
<name> stands for a variable word of a message.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from artifacts.records import without_collections
from configs.load_recipe import CHECKOUT
from flows.cli import FAILED, OF_ERRORS, WRONG_INPUT
from flows.error_remedies import FREQUENT, REMEDIES

#: Outcomes of single pictures, and errors that no user sees.
INTERNAL = {"FetchFailed", "RefusedAddress", "BadSample", "MalformedList"}
HEAD = """# Troubleshooting

Search this page for words of a message. It has the frequent errors first, then all messages of
Kilnworks by their class. `python -m flows.error_messages_page` prints it from the code.

* An error is the last line of the output, `kiln: ...`. It says what was wrong, where, and
  what to do.
* A traceback instead of one line is a bug in Kilnworks: report it.
* Every stage resumes. To run the same command again is always safe.

| exit code | meaning |
|---|---|
| 0 | published, or all stages up to `--until` are built |
| 1 | failed: look at the message, then run again |
| 2 | wrong input: correct it first |
| 3 | the gate rejected the model |
| 130 | interrupted (Ctrl-C) |

| to find out | command |
|---|---|
| what this machine lacks | `kiln doctor` |
| what is in the store | `kiln ls` |
| why a stage was built again, from what, and with which settings | `kiln show KEY` |
| whether a file is damaged | `kiln verify` |
| what may be deleted | `kiln gc` |
| a recipe with all its settings | `kiln recipes NAME` |
"""


@dataclass
class ErrorClass:
    """A class of errors: the first line of its docstring, its bases and its messages."""

    name: str
    about: str
    bases: list[str]
    messages: dict[str, list[str]] = field(default_factory=dict)  # text -> files


def page() -> str:
    """The text of docs/troubleshooting.md."""
    lines = [HEAD, "## Frequent", "", "| message | cause | remedy |", "|---|---|---|"]
    lines += [f"| `{one.text}` | {one.cause} | {one.remedy} |" for one in FREQUENT]
    lines += ["", "## All messages", "", "`<name>` and `...` stand for words that vary."]
    classes = error_classes()
    for name in sorted(classes):
        found = classes[name]
        if not found.messages:
            continue
        lines += ["", f"### {name}, exit code {exit_code(name, classes)}", ""]
        lines += [f"{found.about} {REMEDIES.get(name, '')}".rstrip(), ""]
        lines += ["| message | in |", "|---|---|"]
        for text, files in sorted(found.messages.items()):
            lines.append(f"| `{text}` | {', '.join(f'`{file}`' for file in files)} |")
    return "\n".join(lines) + "\n"


@cache
def error_classes() -> dict[str, ErrorClass]:
    """The classes of errors that a user can see, with their messages."""
    trees = {str(path.relative_to(CHECKOUT)): _parsed(path) for path in _files()}
    found = {"ValueError": ErrorClass("ValueError", "A setting has an invalid value.", [])}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and (one := _class(node)) is not None:
                found[one.name] = one
    for name in [name for name in found if not _is_error(name, found)]:
        del found[name]
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
                continue
            name = node.func.id
            # Others' ValueErrors are bugs, or become errors of ours.
            if name in found and (name != "ValueError" or file.startswith("configs/")):
                for text in _texts(node.args[0]):
                    files = found[name].messages.setdefault(_cell(text), [])
                    files += [file] if file not in files else []
    return found


def exit_code(name: str, classes: dict[str, ErrorClass]) -> int:
    """The exit code of `kiln` after an error of a class."""
    ancestors = _ancestors(name, classes)
    fixed = [OF_ERRORS[one] for one in (name, *ancestors) if one in OF_ERRORS]
    return fixed[0] if fixed else WRONG_INPUT if "ValueError" in (name, *ancestors) else FAILED


def _files() -> Iterator[Path]:
    for package in ("artifacts", "configs", "demo", "flows", "runtimes", "tasks"):
        yield from sorted((CHECKOUT / package).rglob("*.py"))


@cache
def _parsed(path: Path) -> ast.Module:
    # CPython before 3.11.8 fails if another thread parses, too, while a collection runs Python code
    # (SystemError: AST constructor recursion depth mismatch, gh-106905).
    with without_collections():
        return ast.parse(path.read_text(encoding="utf-8"))


def _class(node: ast.ClassDef) -> ErrorClass | None:
    if node.name.startswith("_") or node.name in INTERNAL:
        return None
    about = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    return ErrorClass(node.name, about, bases)


def _ancestors(name: str, classes: dict[str, ErrorClass], below: tuple[str, ...] = ()) -> list[str]:
    """Names of the classes above one. Classes of one name, such as Encoder, can form a circle."""
    below = (*below, name)
    bases = classes[name].bases if name in classes else []
    above = [base for base in bases if base not in below]
    return [one for base in above for one in (base, *_ancestors(base, classes, below))]


def _is_error(name: str, classes: dict[str, ErrorClass]) -> bool:
    every = (name, *_ancestors(name, classes))
    return any(one in ("ValueError", "RuntimeError", "OSError", "Exception") for one in every)


def _texts(node: ast.expr) -> list[str]:
    """The messages that an expression can give; none if it has no words of its own."""
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body), *_texts(node.orelse)]
    text = _rendered(node)
    return [text] if re.search(r"[a-z]{2}", re.sub(r"<\w*>|\.\.\.", "", text)) else []


def _rendered(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_rendered(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _rendered(node.left) + _rendered(node.right)
    if isinstance(node, ast.FormattedValue):
        inner = node.value
        name = inner.attr if isinstance(inner, ast.Attribute) else getattr(inner, "id", "")
        return f"<{name}>" if len(name) > 2 else "..."
    return "..."


def _cell(text: str) -> str:
    """A message as a code span in a table."""
    return " ".join(text.replace("`", "").replace("|", "\\|").split())


if __name__ == "__main__":
    print(page(), end="")
