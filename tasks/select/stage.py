"""The select stage: which pictures are trained on, as an artifact of metadata."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from artifacts.records import digest_json, read_checked
from artifacts.store import Artifact, Draft, Shard, Store
from configs.errors import Failed
from configs.settings.recipe import Recipe
from configs.settings.select import Select
from tasks.build_or_reuse import Stage
from tasks.describe.describers import columns_of, specs_of
from tasks.describe.tables import describers_of, read_described
from tasks.download.listed import OWN_COLUMNS, listed
from tasks.panels import Facts, Panel, Table
from tasks.progress import Report
from tasks.select.groups import group_pictures
from tasks.select.selection import (
    FILE,
    check_columns,
    choose,
    named_columns,
    read_entries,
    require_named,
)
from tasks.sql_condition import require_value

log = logging.getLogger("kiln")
STAGE = "select"
#: Increment when the meaning of a selection changes.
VERSION = 2
#: Memory of DuckDB, which writes the rest to its folder.
MEMORY = "2GB"
ROW_GROUP = 1 << 20
#: Columns that identify an entry.
ENTRY = pa.schema([("tar", pa.string()), ("row", pa.int32()), ("id", pa.binary(32))])
#: Examples of each reason in the summary.
EXAMPLES = 3


@dataclass(frozen=True)
class SelectStage(Stage):
    """Entries of the data set, kept or dropped for a reason."""

    recipe: Recipe
    images: Artifact
    #: None if the recipe describes nothing.
    described: Artifact | None

    name = STAGE
    version = VERSION

    @property
    def select(self) -> Select:
        """The section of the recipe."""
        assert self.recipe.select is not None
        return self.recipe.select

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that affect the selection; no duplicate crosses the split."""
        return {**self.select.key_settings(), "holdout": self.recipe.encode.holdout}

    @property
    def inputs(self) -> dict[str, str]:
        """The pictures and their descriptions."""
        return {name: artifact.digest for name, artifact in self.parents.items()}

    @property
    def parents(self) -> dict[str, Artifact]:
        """The pictures and their descriptions."""
        images = {"images": self.images}
        return images if self.described is None else {**images, "described": self.described}

    def build(self, draft: Draft, progress: Report) -> dict[str, Any]:
        """Choose the entries.

        Raises:
            Refused: a condition is invalid, or has no value of a picture.
        """
        with (
            tempfile.TemporaryDirectory(prefix="kiln-select-") as scratch,
            _database(scratch) as db,
        ):
            progress(0, 3, "reading the descriptions")
            shown, read = self._read_tables(db)
            progress(1, 3, "comparing pictures")
            shard = self._groups(draft.store, db, Path(scratch))
            draft.add_shard(shard)
            _make_entries(db, draft.store, shard)
            progress(2, 3, "choosing pictures")
            entries = read_entries(db, self.select, shown)
            chosen, summary = choose(entries, self.select, read, self.recipe.encode.holdout)
            if not summary["kept"]:
                require_value(db, self.select.where or "true", "select.where")
            file = Path(scratch, FILE)
            pq.write_table(chosen, file, compression="zstd", row_group_size=ROW_GROUP)
            draft.upload(str(file), FILE)
        return summary | {"examples": _examples(chosen, summary["reasons"])}

    def _read_tables(self, db: duckdb.DuckDBPyConnection) -> tuple[list[str], list[str]]:
        """Make the view `listed`, and the table `described` of the columns that are read.

        Returns the columns that the section names, and those of descriptions among them.
        """
        listed(self.images, db).create_view("listed")
        of_list = _types(db, "listed")
        of_describers = self._columns()
        named = {name.lower() for name in named_columns(self.select)}
        read = [name for name in of_describers if name.lower() in named]
        db.register("descriptions", self._describe(read))
        db.execute("create temp table described as from descriptions")
        db.unregister("descriptions")
        # A column that no expression reads may have any type.
        types = of_list | dict.fromkeys(of_describers, "VARCHAR") | {"cluster": "BIGINT"}
        types |= {name: kind for name, kind in _types(db, "described").items() if name in read}
        return check_columns(self.select, types), read

    def _columns(self) -> list[str]:
        """The columns of descriptions."""
        if self.described is None:
            return []
        return [column for values in self.described.summary["values"].values() for column in values]

    def _describe(self, columns: list[str]) -> pa.RecordBatchReader:
        """Descriptions of all entries: tar, row, id and some columns."""
        if self.described is None:
            return pa.RecordBatchReader.from_batches(ENTRY, [])
        return read_described(self.described, columns)

    def _groups(self, store: Store, db: duckdb.DuckDBPyConnection, scratch: Path) -> Shard:
        """The shard of `group_pictures`, which another condition or limit does not change."""
        chosen = self.select.key_settings()
        facts = {name: chosen[name] for name in ("duplicates", "clusters")}
        own = {"keep", "exact"}  # which of a group is kept, not the groups
        facts["duplicates"] = {n: v for n, v in facts["duplicates"].items() if n not in own}
        names = {name for name, _ in self.select.describers.values()}
        digests = (
            {n: d for n, d in describers_of(self.described).items() if n in names}
            if self.described
            else {}
        )
        inputs = {"images": self.images.digest, "describers": digests}
        key = digest_json({"stage": STAGE, "version": VERSION, **facts, **inputs})
        if (shard := store.shard(STAGE, key)) is not None:
            return shard
        file = scratch / "groups"
        groups = group_pictures(db, self._describe, self.select, scratch)
        pq.write_table(groups, file, compression="zstd", row_group_size=ROW_GROUP)
        return store.commit_shard(STAGE, key, {".parquet": str(file)}, {"pictures": len(groups)})

    def check(self, summary: dict[str, Any]) -> None:
        """Raise Failed if no picture is kept; tell how many are."""
        reasons = ", ".join(f"{reason}: {n:,}" for reason, n in summary["reasons"].items())
        if summary["kept"] == 0:
            raise Failed(f"select: no picture is kept ({reasons or 'none was downloaded'})")
        kept, entries = f"{summary['kept']:,}", f"{summary['entries']:,}"
        why = f" ({reasons})" if reasons else ""
        log.info("select: %s of %s pictures are kept%s", kept, entries, why)

    @staticmethod
    def show(artifact: Artifact) -> list[Panel]:
        """Counts by reason, histograms of the condition's columns, and examples."""
        from tasks.data_page import selection_panels

        summary = artifact.summary
        counts = ("entries", "kept", "held_out", "groups", "largest_group")
        reasons = [{"reason": k, "pictures": n} for k, n in summary["reasons"].items()]
        return [
            Facts("Selected", {name.replace("_", " "): summary[name] for name in counts}),
            Table("Dropped", reasons, bars="pictures"),
            Table("Examples", summary["examples"]),
            *selection_panels(artifact),
        ]


def check_names(recipe: Recipe) -> None:
    """Check the columns that a recipe's conditions name, before any work; models are local.

    Raises:
        Refused: with the nearest name of a column that there will be, or for no single expression.
    """
    assert recipe.select is not None
    columns = [*OWN_COLUMNS, *getattr(recipe.source, "additional_columns", ()), "cluster"]
    specs = {}
    if recipe.describe is not None:
        specs = specs_of(recipe.describe, recipe.download.max_pixels)
    columns += [column for name, spec in specs.items() for column in columns_of(name, spec)]
    require_named(recipe.select, columns)


@contextmanager
def _database(folder: str) -> Iterator[duckdb.DuckDBPyConnection]:
    """A database of limited memory."""
    config: dict[str, Any] = {"memory_limit": MEMORY, "temp_directory": folder}
    with duckdb.connect(config=config) as db:
        db.execute("set global timezone = 'UTC'")  # times have one text on all machines
        yield db


def _types(db: duckdb.DuckDBPyConnection, view: str) -> dict[str, str]:
    """Name -> type of a view's columns."""
    return {name: kind for name, kind, *_ in db.execute(f"describe {view}").fetchall()}


def _make_entries(db: duckdb.DuckDBPyConnection, store: Store, groups: Shard) -> None:
    """Make the view `entries`: list, descriptions and groups of each entry."""
    [entry] = groups.files
    data = read_checked(store.fs, store.shards_path(STAGE), entry.path, entry.sha256)
    db.register("groups", pq.read_table(pa.BufferReader(data), pre_buffer=False))
    db.execute(
        "create view entries as "
        "select listed.*, described.* exclude (tar, row, id), groups.* exclude (id) "
        "from listed left join described using (tar, row) join groups on groups.id = listed.id"
    )


def _examples(chosen: pa.Table, reasons: dict[str, int]) -> list[dict[str, Any]]:
    """The first entries of each reason, for people."""
    examples = []
    for reason in reasons:
        some = chosen.filter(pc.equal(chosen["reason"], reason)).slice(0, EXAMPLES)
        for row in some.drop_columns(["tar", "row", "kept"]).to_pylist():
            examples.append({"picture": row.pop("id").hex()[:12], **row})
    return examples
