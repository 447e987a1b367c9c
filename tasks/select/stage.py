"""The select stage: which pictures are trained on, as an artifact of metadata."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from artifacts.records import read_checked
from artifacts.store import Artifact, Draft
from configs.settings.recipe import Recipe
from configs.settings.select import Select
from tasks.build_or_reuse import Stage
from tasks.progress import Report
from tasks.select.selection import FILE, check_columns, choose, read_entries

log = logging.getLogger("kiln")
STAGE = "select"
#: Increment when the meaning of a selection changes.
VERSION = 1
#: Memory of DuckDB, which writes the rest to its folder.
MEMORY = "2GB"
ROW_GROUP = 1 << 20
#: Examples of each reason in the summary.
EXAMPLES = 3
PLACE = "the table of pictures"


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
            Refused: a condition is invalid; nothing was compared.
            Failed: no picture is left.
        """
        with (
            tempfile.TemporaryDirectory(prefix="kiln-select-") as scratch,
            _database(scratch) as db,
        ):
            described = self._tables(db)
            shown = check_columns(
                self.select, types_of(db, "entries") | {"cluster": "BIGINT"}, PLACE
            )
            progress(0, 2, "comparing pictures")
            shard = self._groups(draft.store, db, Path(scratch))
            draft.add_shard(shard)
            [entry] = shard.files
            root = draft.store.shards_path(STAGE)
            groups = pq.read_table(
                pa.BufferReader(read_checked(draft.store.fs, root, entry.path, entry.sha256))
            )
            db.register("groups", groups)
            progress(1, 2, "choosing pictures")
            entries = read_entries(db, self.select, shown)
            chosen, summary = choose(entries, self.select, described, self.recipe.encode.holdout)
            file = Path(scratch, FILE)
            pq.write_table(chosen, file, compression="zstd", row_group_size=ROW_GROUP)
            draft.upload(str(file), FILE)
        self.check(summary)
        return summary | {"examples": _examples(chosen, summary["reasons"])}
