"""SQL conditions of a recipe: one expression over the columns of a table, checked before any work.

DuckDB evaluates it beside files that a run may read. It is therefore parsed here, in a database
without files, and used as DuckDB writes what it has parsed: no text of it ends its parentheses.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import duckdb

from configs.errors import Refused

#: Comparison in DuckDB's syntax tree -> its operator, and the one with exchanged sides.
OPERATORS = {
    "COMPARE_GREATERTHAN": (">", "<"),
    "COMPARE_GREATERTHANOREQUALTO": (">=", "<="),
    "COMPARE_LESSTHAN": ("<", ">"),
    "COMPARE_LESSTHANOREQUALTO": ("<=", ">="),
}
CHECKED = "checked_columns"


class Threshold(NamedTuple):
    """A comparison of a column with a number, in a condition."""

    column: str
    operator: str  # < <= > >=
    value: float


class Condition(NamedTuple):
    """A parsed condition.

    Attributes:
        sql: true or false for every row: an error of a row, or a null, is false.
    """

    sql: str
    columns: tuple[str, ...]  # that it names, in order
    thresholds: tuple[Threshold, ...]


@cache
def read_condition(text: str, setting: str) -> Condition:
    """Parse a condition. Raises Refused if it is more than one expression of columns."""
    with _database().cursor() as db:
        trees = [f"select ({text}\n)", "select 1"]
        [tree], [plain] = db.execute("select json_serialize_sql(unnest(?))", [trees]).fetchall()
        try:
            parsed = json.loads(tree)
        except RecursionError:
            raise Refused("it is nested too deep", setting=setting) from None
        if parsed["error"]:
            why = " ".join(str(parsed["error_message"]).split())
            raise Refused(f"{why}: write a condition such as score > 5", setting=setting)
        selected = _take_selected(parsed)
        one = json.loads(plain)
        _take_selected(one)
        nodes = list(_nodes(selected))
        if parsed != one or len(selected) != 1 or any(n.get("class") == "SUBQUERY" for n in nodes):
            raise Refused("it is a query: write one expression of columns", setting=setting)
        names = {n["function_name"].lower() for n in nodes if n.get("class") == "FUNCTION"}
        for (name,) in db.execute(
            "select function_name from duckdb_functions() where function_name in "
            "(select unnest(?)) and (stability <> 'CONSISTENT' or has_side_effects)",
            [[*names]],
        ).fetchall():
            hint = "for a tenth of the rows, write md5_number(url) % 10 = 0"
            why = f"{name}() has another value in each run: {hint}"
            raise Refused(why, setting=setting)
        [sql] = db.execute("select json_deserialize_sql(?)", [tree]).fetchall()[0]
    own = {name for n in nodes if n.get("class") == "LAMBDA" for name in _columns(_nodes(n["lhs"]))}
    columns = tuple(name for name in dict.fromkeys(_columns(nodes)) if name not in own)
    condition = sql.removeprefix("SELECT ")
    return Condition(f"coalesce(try({condition}), false)", columns, tuple(_thresholds(nodes)))


def check_condition(
    condition: Condition, types: Mapping[str, str], setting: str, place: str, hint: str = ""
) -> None:
    """Raise Refused if a table with columns of DuckDB's `types` cannot have the condition.

    Args:
        place: the table, for people.
        hint: what to do about a wrong type.
    """
    if (why := _fault(condition, tuple(types.items()))) is not None:
        raise Refused(f"{place}: {why}{hint}", setting=setting)


@cache
def _fault(condition: Condition, types: tuple[tuple[str, str], ...]) -> str | None:
    columns = ", ".join(f"{quoted(name)} {kind}" for name, kind in types)
    expression = condition.sql.removeprefix("coalesce(try(").removesuffix("), false)")
    with _database().cursor() as db:
        try:
            db.execute(f"create temp table {CHECKED} ({columns})")
            selected = db.execute(f"describe select {expression} from {CHECKED}").fetchall()
            if (kinds := [kind for _, kind, *_ in selected]) != ["BOOLEAN"]:
                return f"it is a value of type {kinds[0]}: write a condition such as score > 5"
            db.execute(f"select count(*) from {CHECKED} where {condition.sql}")
        except duckdb.Error as error:  # its first line ends before a picture of the query
            return str(error).partition("\n")[0].partition(": ")[2]
    return None


def quoted(column: str) -> str:
    """A column's name as SQL."""
    return '"' + column.replace('"', '""') + '"'


@cache
def _database() -> duckdb.DuckDBPyConnection:
    """A database without files, network and extensions of others."""
    database = duckdb.connect(
        config={"enable_external_access": "false", "lock_configuration": "true"}
    )
    atexit.register(database.close)
    return database


def _take_selected(parsed: dict[str, Any]) -> list[dict[str, Any]]:
    """The selected expressions, which are removed from a syntax tree."""
    selected: list[dict[str, Any]] = parsed["statements"][0]["node"].pop("select_list", [])
    return selected


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """The objects in a syntax tree, in the order of the text."""
    rest = [tree]
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            yield part
            rest += reversed(part.values())
        elif isinstance(part, list):
            rest += reversed(part)


def _columns(nodes: Iterator[dict[str, Any]] | list[dict[str, Any]]) -> Iterator[str]:
    return (node["column_names"][0] for node in nodes if node.get("class") == "COLUMN_REF")


def _thresholds(nodes: list[dict[str, Any]]) -> Iterator[Threshold]:
    for node in nodes:
        if node.get("class") == "BETWEEN":
            sides = [(node["input"], ">=", node["lower"]), (node["input"], "<=", node["upper"])]
        elif node.get("type") in OPERATORS:
            operator, exchanged = OPERATORS[node["type"]]
            sides = [(node["left"], operator, node["right"])]
            sides += [(node["right"], exchanged, node["left"])]
        else:
            continue
        for of, operator, constant in sides:
            column = of["child"] if of["class"] == "CAST" else of
            literal = constant.get("literal", {})
            if column["class"] == "COLUMN_REF" and literal.get("kind") in ("INTEGER", "NUMERIC"):
                yield Threshold(column["column_names"][-1], operator, float(literal["text"]))
