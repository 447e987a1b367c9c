"""SQL conditions and expressions of recipes, over the columns of one table; DuckDB evaluates them.

An expression reads its columns alone: no other table, no file and no setting. Its value is the same
at each evaluation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import duckdb

from configs.errors import Refused
from configs.secrets import one_line
from tasks.download.source_files import require_columns

#: Parts of an expression that read more than a row.
FORBIDDEN = {"SUBQUERY": "a subquery", "WINDOW": "a window function", "STAR": "a star"}


def columns_of(text: str, setting: str) -> list[str]:
    """Columns that an expression reads, as it names them, in its order.

    Args:
        setting: dotted setting that has the expression, for errors.

    Raises:
        Refused: the text is no expression of SQL, or reads more than columns.
    """
    query = "select 1 from entries where (\n{}\n)"
    tree = _parsed(query.format(text))
    if tree["error"]:
        raise Refused(f"{one_line(text)!r}: {one_line(tree['error_message'])}", setting=setting)
    [statement, *further] = tree["statements"]
    condition = statement["node"].pop("where_clause", None)
    [usual] = _parsed(query.format("true"))["statements"]
    usual["node"].pop("where_clause")
    if further or statement != usual:
        raise Refused(f"{one_line(text)!r} is no single expression", setting=setting)
    names = []
    parameters = set()
    for part in _parts(condition):
        if part.get("class") in FORBIDDEN:
            why = f"{one_line(text)!r} has {FORBIDDEN[part['class']]}: use the columns of a row"
            raise Refused(why, setting=setting)
        if part.get("class") == "FUNCTION" and part["function_name"] in _inconstant():
            why = f"{one_line(text)!r}: {part['function_name']}() has another value at each run"
            raise Refused(why, setting=setting)
        if part.get("class") == "LAMBDA":
            parameters |= {
                name for ref in _parts(part["lhs"]) for name in ref.get("column_names", ())
            }
        if part.get("class") == "COLUMN_REF":
            names.append(part["column_names"][0])
    return [name for name in dict.fromkeys(names) if name not in parameters]


def check_expression(
    text: str, columns: Mapping[str, str], setting: str, *, is_condition: bool = True
) -> None:
    """Refuse an expression that is no condition over a table, or no number.

    Args:
        columns: name -> type (DuckDB's) of the table's columns.
        setting: dotted setting that has the expression, for errors.

    Raises:
        Refused: with the nearest name of a column that the table lacks.
    """
    known = {name.lower(): name for name in columns}
    wanted = {name: known.get(name.lower(), name) for name in columns_of(text, setting)}
    for name in wanted.values():
        require_columns({setting: name}, [*columns], "the table of pictures")
    with duckdb.connect(config={"enable_external_access": False}) as db:
        fields = ", ".join(f"{quoted(name)} {kind}" for name, kind in columns.items())
        db.execute(f"create table entries ({fields})")
        try:
            if is_condition:
                db.execute(f"select 1 from entries where (\n{text}\n)")
            described = db.execute(f"describe select (\n{text}\n) from entries").fetchall()
        except duckdb.Error as error:
            words = f"{one_line(text)!r}: {one_line(str(error).partition('LINE')[0])}"
            raise Refused(words, setting=setting) from None
    kind = described[0][1]
    if is_condition and kind != "BOOLEAN":
        raise Refused(f"{one_line(text)!r} is of type {kind}: compare it", setting=setting)
    if not is_condition and not _is_number(kind):
        raise Refused(f"{one_line(text)!r} is of type {kind}, no number", setting=setting)


def quoted(name: str) -> str:
    """A column's name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def _is_number(kind: str) -> bool:
    return kind.endswith("INT") or kind.partition("(")[0] in (
        *("INTEGER", "UINTEGER", "FLOAT", "DOUBLE", "DECIMAL", "BOOLEAN"),
    )


def _parsed(query: str) -> dict[str, Any]:
    with duckdb.connect(config={"enable_external_access": False}) as db:
        [(tree,)] = db.execute("select json_serialize_sql($1::varchar)", [query]).fetchall()
    return dict(json.loads(tree))


@cache
def _inconstant() -> set[str]:
    """Functions whose value depends on more than their arguments."""
    query = "select function_name from duckdb_functions() where stability != 'CONSISTENT'"
    with duckdb.connect() as db:
        return {name for (name,) in db.execute(query).fetchall()}


def _parts(tree: Any) -> Iterator[dict[str, Any]]:
    """All objects in a JSON tree."""
    if isinstance(tree, dict):
        yield tree
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _parts(part)
