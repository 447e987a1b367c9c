"""SQL conditions and expressions of recipes, over the columns of one table; DuckDB evaluates them.

An expression reads its columns alone: no other table, no file and no setting. Its value is the same
at each evaluation.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import duckdb

from configs.errors import Refused
from configs.secrets import one_line

#: Parts of an expression that read more than a row.
FORBIDDEN = {"SUBQUERY": "a subquery", "WINDOW": "a window function", "STAR": "a star"}

#: Comparison in DuckDB's syntax tree -> its operator, and the one with exchanged sides.
OPERATORS = {
    "COMPARE_GREATERTHAN": (">", "<"),
    "COMPARE_GREATERTHANOREQUALTO": (">=", "<="),
    "COMPARE_LESSTHAN": ("<", ">"),
    "COMPARE_LESSTHANOREQUALTO": ("<=", ">="),
}
LONGEST = 200  # characters of an expression in an error
#: Columns of a table in an error, characters of a name there, and names that are compared.
SHOWN = 20
LONGEST_NAME = 100
COMPARED = 1000


class Threshold(NamedTuple):
    """A comparison of a column with a number."""

    column: str
    operator: str  # < <= > >=
    value: float


def columns_of(text: str, setting: str) -> list[str]:
    """Columns that an expression reads, as it names them, in its order.

    Args:
        setting: dotted setting that has the expression, for errors.

    Raises:
        Refused: the text is no expression of SQL, or reads more than columns.
    """
    tree = _parsed_condition(text, setting)
    [statement, *further] = tree["statements"]
    condition = statement["node"].pop("where_clause", None)
    [usual] = _parsed_condition("true", setting)["statements"]
    usual["node"].pop("where_clause")
    if further or statement != usual:
        raise Refused(f"{shown(text)} is no single expression", setting=setting)
    names = []
    parameters = set()
    for part in _parts(condition):
        if part.get("class") in FORBIDDEN:
            why = f"{shown(text)} has {FORBIDDEN[part['class']]}: use the columns of a row"
            raise Refused(why, setting=setting)
        if part.get("class") == "FUNCTION" and part["function_name"] in _inconstant():
            why = f"{shown(text)}: {part['function_name']}() has another value at each run"
            remedy = "md5_number(url) % 10 = 0 has a tenth of the rows"
            raise Refused(why, setting=setting, remedy=remedy)
        if part.get("class") == "LAMBDA":
            parameters |= {
                name for ref in _parts(part["lhs"]) for name in ref.get("column_names", ())
            }
        if part.get("class") == "COLUMN_REF":
            names.append(part["column_names"][0])
    return [name for name in dict.fromkeys(names) if name not in parameters]


def check_expression(
    text: str,
    columns: Mapping[str, str],
    setting: str,
    place: str = "the table of pictures",
    *,
    is_condition: bool = True,
) -> None:
    """Refuse an expression that is no condition over a table, or no number.

    Args:
        columns: name -> type (DuckDB's) of the table's columns.
        setting: dotted setting that has the expression, for errors.
        place: the table, for errors.

    Raises:
        Refused: with the nearest name of a column that the table lacks.
    """
    known = {name.lower(): name for name in columns}
    wanted = {name: known.get(name.lower(), name) for name in columns_of(text, setting)}
    for name in wanted.values():
        require_columns({setting: name}, [*columns], place)
    with duckdb.connect(config={"enable_external_access": False}) as db:
        fields = ", ".join(f"{quoted(name)} {kind}" for name, kind in columns.items())
        db.execute(f"create table entries ({fields})")
        try:
            if is_condition:
                db.execute(f"select 1 from entries where (\n{text}\n)")
            described = db.execute(f"describe select (\n{text}\n) from entries").fetchall()
        except duckdb.Error as error:
            words = f"{place}: {shown(text)}: {one_line(error).partition('LINE')[0].strip()}"
            raise Refused(words, setting=setting) from None
    kind = described[0][1]
    if is_condition and kind != "BOOLEAN":
        raise Refused(f"{shown(text)} is of type {kind}: compare it", setting=setting)
    if not is_condition and not is_number(kind):
        raise Refused(f"{shown(text)} is of type {kind}, no number", setting=setting)


def require_value(
    db: duckdb.DuckDBPyConnection, text: str, setting: str, table: str = "entries"
) -> None:
    """Raise Refused, with the first error, if a condition on the rows of a table has one.

    Args:
        setting: dotted setting that has the expression, for errors.
        table: its name, or SQL in brackets.
    """
    try:
        db.execute(f"select count(*) from {table} where (\n{text}\n)")
    except duckdb.Error as error:
        why = one_line(error).partition("LINE")[0].strip()
        remedy = "try_cast(x as double) of a text that is no number is null"
        raise Refused(f"{shown(text)}: {why}", setting=setting, remedy=remedy) from None


def require_columns(wanted: dict[str, str], present: Sequence[str], file: str) -> None:
    """Raise Refused unless every column of {setting: column} is in `file`, and only once."""
    for setting, column in wanted.items():
        if present.count(column) > 1:
            why = f"{file} has several columns {column!r}: rename the others"
            raise Refused(why, setting=setting)
        if column not in present:
            near = difflib.get_close_matches(column, present[:COMPARED], n=1, cutoff=0.5)
            names = ", ".join(" ".join(name[:LONGEST_NAME].split()) for name in present[:SHOWN])
            more = f" and {len(present) - SHOWN:,} others" if len(present) > SHOWN else ""
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {names}{more}"
            raise Refused(f"{file} has no column {column!r} ({hint})", setting=setting)


def quoted(name: str) -> str:
    """A column's name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def is_number(kind: str) -> bool:
    """Whether a type (DuckDB's) is of numbers, or of truth values, which count as 0 and 1."""
    return kind.endswith("INT") or kind.partition("(")[0] in (
        *("INTEGER", "UINTEGER", "FLOAT", "DOUBLE", "DECIMAL", "BOOLEAN"),
    )


def thresholds_of(text: str, setting: str) -> list[Threshold]:
    """Comparisons of a column with a number in a condition, in its order. Raises Refused."""
    thresholds = []
    for part in _parts(_parsed_condition(text, setting)):
        if part.get("class") == "BETWEEN":
            sides = [(part["input"], ">=", part["lower"]), (part["input"], "<=", part["upper"])]
        elif part.get("type") in OPERATORS:
            operator, exchanged = OPERATORS[part["type"]]
            sides = [(part["left"], operator, part["right"])]
            sides += [(part["right"], exchanged, part["left"])]
        else:
            continue
        for side, operator, constant in sides:
            column = side["child"] if side["class"] == "CAST" else side
            literal = constant.get("literal", {})
            if column["class"] == "COLUMN_REF" and literal.get("kind") in ("INTEGER", "NUMERIC"):
                name = column["column_names"][-1]
                thresholds.append(Threshold(name, operator, float(literal["text"])))
    return thresholds


def conjuncts(text: str, setting: str) -> list[str]:
    """The parts of a condition that its outermost `and`s join, as they are written.

    Parts within brackets are one if others are beside them. Raises Refused.
    """
    [statement] = _parsed_condition(text, setting)["statements"]
    condition = statement["node"]["where_clause"]
    if condition["type"] != "CONJUNCTION_AND":
        return [text]
    parts = []
    start = 0
    ends = [match.span() for match in re.finditer(r"\band\b", text, re.IGNORECASE)]
    for end, following in [*ends, (len(text), len(text))]:
        with suppress(Refused):  # as `x between 1`
            _parsed_condition(text[start:end], setting)
            parts.append(text[start:end].strip())
            start = following
    return parts if len(parts) == len(condition["children"]) else [text]


def _parsed_condition(text: str, setting: str) -> dict[str, Any]:
    """The syntax tree of a query with a condition. Raises Refused."""
    try:
        tree = json.loads(_serialized(f"select 1 from entries where (\n{text}\n)"))
    except RecursionError:
        raise Refused("it is nested too deep", setting=setting) from None
    if tree["error"]:
        why = " ".join(str(tree["error_message"]).split())
        raise Refused(f"{shown(text)}: {why}", setting=setting)
    return dict(tree)


@cache
def _serialized(query: str) -> str:
    with duckdb.connect(config={"enable_external_access": False}) as db:
        [(tree,)] = db.execute("select json_serialize_sql($1::varchar)", [query]).fetchall()
    return str(tree)


def shown(text: str) -> str:
    """An expression in an error: one line, not too long."""
    line = " ".join(text.split())
    return repr(line if len(line) <= LONGEST else f"{line[:LONGEST]}…")


#: Functions that read the clock, though DuckDB calls them consistent.
CLOCKS = {"age", "ago", "current_localtime", "current_localtimestamp"}


@cache
def _inconstant() -> set[str]:
    """Functions whose value depends on more than their arguments."""
    query = "select function_name from duckdb_functions() where stability != 'CONSISTENT'"
    with duckdb.connect() as db:
        return CLOCKS | {name for (name,) in db.execute(query).fetchall()}


def _parts(tree: Any) -> Iterator[dict[str, Any]]:
    """All objects in a JSON tree, in its order."""
    rest = [tree]
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            yield part
            rest += reversed(part.values())
        elif isinstance(part, list):
            rest += reversed(part)
