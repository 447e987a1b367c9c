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
import pyarrow.parquet as pq

from artifacts.records import digest_json, read_checked
from artifacts.store import Artifact, Draft, Shard
from configs.errors import Failed, Refused
from configs.settings.recipe import Recipe
from configs.settings.select import Select
from tasks.build_or_reuse import Stage
from tasks.describe.tables import described
from tasks.download.listed import listed
from tasks.panels import Facts, Panel, Table
from tasks.progress import Report
from tasks.select.groups import group_pictures
from tasks.select.selection import FILE, choose, read_entries, shown_columns
from tasks.sql_condition import check_expression, quoted

log = logging.getLogger("kiln")
STAGE = "select"
#: Increment when the meaning of a selection changes.
VERSION = 1
#: Memory of DuckDB, which writes the rest to its folder.
MEMORY = "2GB"
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
        """The settings that affect the selection; the split does, since no side sees the other."""
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
        with tempfile.TemporaryDirectory(prefix="kiln-select-") as scratch, _database(scratch) as db:
            known = self._tables(db)
            for setting, text in (("where", self.select.where), ("prefer", self.select.prefer)):
                if text is not None:
                    is_condition = setting == "where"
                    check_expression(text, known, f"select.{setting}", is_condition=is_condition)
            progress(0, 2, "comparing pictures")
            shard = self._groups(draft, db, Path(scratch))
            progress(1, 2, "choosing pictures")
            ...
