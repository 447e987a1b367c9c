"""Which entries of the data set are kept, and the reason of each other one.

An entry is dropped for the first reason that applies, in the order of `choose`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from io import BytesIO
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from artifacts.store import Artifact
from configs.errors import Refused
from configs.settings.select import Select
from tasks.select.groups import sha256_numbers
from tasks.sql_condition import check_expression, columns_of, conjuncts, quoted, require_columns

FILE = "selection.parquet"
#: Columns of entries that every selection reads.
OWN = ("tar", "row", "id", "kiln_near", "kiln_similar")
#: Columns that a selection adds.
ADDED = ("kept", "reason", "group")
#: Prefix of columns that only `choose` reads.
COMPUTED = "kiln_"
LEAKED = "near-duplicate of a held-out picture"
Rows = NDArray[np.int64]


def read_selection(artifact: Artifact) -> pa.Table:
    """One row per entry of the images artifact, sorted by `tar` and `row`.

    `tar` string: sha256 (hex) of the image shard's tar; `row` int32: position in it; `id` binary
    (32): sha256 of the picture; `kept` bool; `reason` string: why it was dropped, "" if it was not;
    `group` int64: number of its group of duplicates, null without a duplicate; then the columns
    that the recipe's conditions read.

    Raises:
        Damaged: the file has other bytes than committed.
    """
    return pq.read_table(BytesIO(artifact.read(FILE)), pre_buffer=False)


def named_columns(select: Select) -> dict[str, str]:
    """The columns that a section names -> the setting that does so, in order. Raises Refused."""
    named: dict[str, str] = {}
    for setting, text in (("select.where", select.where), ("select.prefer", select.prefer)):
        named |= dict.fromkeys(columns_of(text, setting) if text else (), setting)
    named |= {name: f"select.cap.{name}" for name in select.cap}
    return named | ({select.balance.by: "select.balance.by"} if select.balance else {})


def require_named(select: Select, columns: Sequence[str]) -> list[str]:
    """The columns that a section reads, as a table spells them.

    Raises:
        Refused: one is absent, or two have its name.
    """
    spelt = {name.lower(): name for name in columns}  # DuckDB ignores case
    taken = [*(name.lower() for name in columns), *ADDED]
    named = {spelt.get(n.lower(), n): setting for n, setting in named_columns(select).items()}
    for name, setting in named.items():
        if taken.count(name.lower()) > 1:
            why = f"the table of pictures has another column {name.lower()!r}"
            remedy = "rename the describer or the list's column"
            raise Refused(why, setting=setting, remedy=remedy)
        require_columns({setting: name}, columns, "the table of pictures")
    return [name for name in named if name not in OWN]


def check_columns(select: Select, types: Mapping[str, str]) -> list[str]:
    """As `require_named`; also whether the expressions fit the columns.

    Args:
        types: name -> type (DuckDB's) of the table's columns.

    Raises:
        Refused: a column is absent, or an expression does not fit its columns.
    """
    shown = require_named(select, [*types])
    if select.where is not None:
        check_expression(select.where, types, "select.where")
    if select.prefer is not None:
        check_expression(select.prefer, types, "select.prefer", is_condition=False)
    return shown


def read_entries(db: duckdb.DuckDBPyConnection, select: Select, shown: Iterable[str]) -> pa.Table:
    """What `choose` reads of each entry: OWN, and computed columns.

    Args:
        db: has a view `entries`.
        shown: further columns, which the selection has.
    """
    computed = {
        "meets": f"try(\n{select.where or 'true'}\n)",
        "preference": f"cast(try(\n{select.prefer or 'null'}\n) as double)",
        "pixels": "cast(original_width as bigint) * original_height",
    }
    for number, part in enumerate(_parts(select)):
        computed[f"part_{number}"] = f"coalesce(try(\n{part}\n), false)"
    columns = [
        *map(quoted, OWN),
        *(f"{value} as {COMPUTED}{name}" for name, value in computed.items()),
        *map(quoted, shown),
    ]
    return db.sql(f"select {', '.join(columns)} from entries order by tar, row").to_arrow_table()


def _parts(select: Select) -> list[str]:
    """The parts of a condition that all must hold, for the reasons."""
    return [] if select.where is None else conjuncts(select.where, "select.where")


class _Remaining:
    """The entries that no reason has dropped yet.

    Attributes:
        code: number of the reason in `reasons`, i16 [N]; 0: kept.
    """

    def __init__(self, count: int) -> None:
        self.code = np.zeros(count, np.int16)
        self.reasons = [""]

    @property
    def kept(self) -> NDArray[np.bool_]:
        return self.code == 0

    def drop(self, dropped: NDArray[np.bool_], reason: str) -> None:
        """Drop those of some entries, a mask [N], that remain."""
        self.code[dropped & self.kept] = len(self.reasons)
        self.reasons.append(reason)

    def places(self, values: Rows, order: Rows) -> Rows:
        """How many remaining entries of the same value precede each in an order; -1 if dropped.

        Args:
            values: i64 [N].
            order: all rows, i64 [N].
        """
        kept = order[self.kept[order]]
        by_value = kept[np.argsort(values[kept], kind="stable")]
        in_turn = values[by_value]
        starts = np.flatnonzero(np.append(True, in_turn[1:] != in_turn[:-1])[: len(kept)])
        lengths = np.diff(np.append(starts, len(kept)))
        places = np.full(len(order), -1)
        places[by_value] = np.arange(len(kept)) - np.repeat(starts, lengths)
        return places


def choose(
    entries: pa.Table, select: Select, described: Collection[str], holdout: float
) -> tuple[pa.Table, dict[str, Any]]:
    """The selection as `read_selection` returns it, and its counts.

    Args:
        entries: of `read_entries`.
        described: columns of descriptions, which are null where a picture could not be described.
        holdout: fraction of the pictures in the held-out split.
    """
    count = len(entries)
    shown = [n for n in entries.column_names if n not in OWN and not n.startswith(COMPUTED)]
    ids = sha256_numbers(entries["id"])
    held_out = ids[:, 0] / 2.0**64 < holdout
    # The split follows the first bytes of the sha256, so a choice by them would prefer one side.
    tie = ids[:, 3]
    preferred = np.lexsort((tie, -pc.fill_null(entries["kiln_preference"], -np.inf).to_numpy()))
    near = entries["kiln_near"].to_numpy()
    similar = entries["kiln_similar"].to_numpy()
    spelt = {name.lower(): name for name in entries.column_names}  # DuckDB ignores case
    remaining = _Remaining(count)

    meets = pc.fill_null(entries["kiln_meets"], False).to_numpy()
    unknown = entries["kiln_meets"].is_null().to_numpy()
    for name in shown:
        if name in described:
            missing = unknown & entries[name].is_null().to_numpy()
            remaining.drop(missing, f"not described: {name}")
    for number, part in enumerate(_parts(select)):
        fails = ~entries[f"{COMPUTED}part_{number}"].to_numpy()
        remaining.drop(~meets & fails, f"where: {part}")
    remaining.drop(~meets, f"where: {select.where}")

    duplicates = select.duplicates
    best = {
        "largest": np.lexsort((tie, -entries["kiln_pixels"].to_numpy())),
        "best": preferred,
        "first": np.arange(count),
    }[duplicates.keep]
    if duplicates.exact:
        remaining.drop(remaining.places(_pictures(ids), best) > 0, "exact duplicate")
    kept_out = similar[held_out & remaining.kept]
    remaining.drop(~held_out & np.isin(similar, kept_out), LEAKED)
    if duplicates.perceptual:
        remaining.drop(remaining.places(near, best) > 0, "near-duplicate")
    if duplicates.semantic:
        remaining.drop(remaining.places(similar, best) > 0, "semantic duplicate")

    for name, most in select.cap.items():
        over = remaining.places(_codes(entries[spelt[name.lower()]]), preferred) >= most
        remaining.drop(over, f"cap of {name}")
    order = preferred
    if select.balance is not None:
        values = _codes(entries[spelt[select.balance.by.lower()]])
        sizes = np.bincount(values[remaining.kept])
        rarest = sizes[sizes > 0].min(initial=count)
        places = remaining.places(values, preferred)
        most = int(rarest * select.balance.factor)
        remaining.drop(places >= most, f"balance of {select.balance.by}")
        order = preferred[np.argsort(places[preferred], kind="stable")]
    if select.limit is not None:
        all_alike = np.zeros(count, np.int64)
        remaining.drop(remaining.places(all_alike, order) >= select.limit, "limit")

    groups, sizes = np.unique(similar, return_counts=True)
    single = np.isin(similar, groups[sizes == 1])
    reasons = pa.DictionaryArray.from_arrays(remaining.code, remaining.reasons)
    columns = {
        **{name: entries[name] for name in ("tar", "row", "id")},
        "kept": remaining.kept,
        "reason": reasons.cast(pa.string()),
        "group": pa.array(similar, mask=single),
        **{name: entries[name] for name in shown},
    }
    counts = np.bincount(remaining.code, minlength=len(remaining.reasons))
    by_reason = zip(remaining.reasons[1:], counts[1:].tolist(), strict=True)
    summary = {
        "entries": count,
        "kept": int(counts[0]),
        "held_out": int((held_out & remaining.kept).sum()),
        "reasons": {reason: n for reason, n in by_reason if n},
        "groups": int((sizes > 1).sum()),
        "largest_group": int(sizes.max(initial=0)),
    }
    return pa.table(columns), summary


def _pictures(ids: NDArray[np.uint64]) -> Rows:
    """A number for each picture, by half of its sha256: i64 [N]."""
    order = np.lexsort((ids[:, 1], ids[:, 0]))
    in_turn = ids[order, :2]
    is_new = (in_turn[1:] != in_turn[:-1]).any(axis=1)
    numbers = np.zeros(len(ids), np.int64)
    numbers[order[1:]] = np.cumsum(is_new)
    return numbers


def _codes(column: pa.ChunkedArray) -> Rows:
    """A number for each value of a column, null too: i64 [N]."""
    encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
    return encoded.indices.to_numpy().astype(np.int64)
