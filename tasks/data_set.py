"""The data set of a recipe's newest run, as its artifacts have it; nothing is built here.

An entry is a position in an image shard: the sha256 of the tar, and the row in it. Entries with the
bytes of another have its id.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa

from artifacts.gc import runs
from artifacts.latent_shards import (
    BAD_REFERENCE,
    INFO,
    NOT_SELECTED,
    LeftOut,
    read_ids,
    read_left_out,
)
from artifacts.store import Artifact, Store
from tasks.caption.tables import CaptionedSample, Rule, captions_to_train, read_captions, tables_of
from tasks.describe.tables import described
from tasks.download.listed import listed
from tasks.encode.crop_to_bucket import TransformSettings
from tasks.panels import human
from tasks.pictures import sources_of
from tasks.select.selection import read_selection
from tasks.sql_condition import Threshold, is_number, quoted, thresholds_of

IMAGES = "download"
STAGES = ("plan", IMAGES, "describe", "select", "caption", "encode", "train")
WHERE = "select.where"
#: Kind of a describer, and name of its value with many numbers.
EMBEDDING = ("clip", "")
#: Columns of `entries` that no column of a list replaces.
OF_STAGES = ("kept", "reason", "group", "captions", "bad")
SHOWN_COLUMNS = 20  # on a model card
MEMORY = "2GB"  # of DuckDB's buffers; the rest is on the disk


class Encoded(NamedTuple):
    """A picture in a latent shard."""

    id: bytes
    shard: str  # key
    group: str  # <split>/<h>x<w>
    row: int
    left_out: str | None  # its value of LeftOut; None: it is read

    @property
    def split(self) -> str:
        return self.group.partition("/")[0]


@dataclass(frozen=True)
class DataSet:
    """Artifacts that were made from one another, by their stages; any of them may be missing."""

    artifacts: Mapping[str, Artifact]

    @classmethod
    def newest(cls, store: Store, recipe: str) -> DataSet:
        """The artifacts of a recipe's newest runs, all of the images of the newest one.

        Raises Refused if a run's record is damaged.
        """
        found: dict[str, Artifact] = {}
        own = (run for run in runs(store) if run.recipe == recipe)
        for run in sorted(own, key=lambda run: run.at, reverse=True):
            made: dict[str, Artifact] = {}
            for stage, key in run.keys:
                artifact = store.load(stage, key) if stage in STAGES else None
                if artifact is not None and _is_newer(artifact, made.get(stage)):
                    made[stage] = artifact
            images = found.get(IMAGES, made.get(IMAGES))
            fitting = {
                stage: artifact
                for stage, artifact in made.items()
                if images is None or _images_of(artifact) in (None, images.digest)
            }
            found = {**fitting, **found}
        return cls(found)

    @classmethod
    def before(cls, artifact: Artifact) -> DataSet:
        """An artifact and what it was made from."""
        found = {artifact.stage: artifact}
        for parent in artifact.manifest["run"].get("parents", {}).values():
            loaded = artifact.store.load(parent["stage"], parent["key"])
            if loaded is not None:
                found = {**cls.before(loaded).artifacts, **found}
        return cls(found)

    @property
    def by_source(self) -> dict[str, DataSet]:
        """Name -> data of each source of a mixture; without one, "" -> this."""
        for stage in reversed(STAGES[1:-1]):
            artifact = self.artifacts.get(stage)
            if artifact is not None and "sources" in artifact.summary:
                return {name: self.before(part) for name, part in sources_of(artifact).items()}
        return {"": self}

    @property
    def thresholds(self) -> list[Threshold]:
        """The comparisons of the selection's condition with numbers."""
        selected = self.artifacts.get("select")
        where = None if selected is None else selected.manifest["settings"].get("where")
        return [] if where is None else thresholds_of(where, WHERE)

    @contextmanager
    def opened(self, where: str = "true") -> Iterator[duckdb.DuckDBPyConnection]:
        """A database with a table `entries`, one row per entry of which SQL is true.

        Its columns: those of `listed`; of the descriptions, those of one value; kept, reason and
        "group" of the selection, all kept without one; captions, JSON of prompt -> text; bad, JSON
        of prompt -> why its caption is rejected.
        """
        with duckdb.connect(config={"memory_limit": MEMORY}) as db:
            rows = listed(self.artifacts[IMAGES], db)
            of_list = (quoted(name) for name in rows.columns if name.lower() not in OF_STAGES)
            sides = [_named(db, "list_side", rows.project(", ".join(of_list)))]
            sides += self._described(db)
            sides += self._selection(db)
            sides += self._captions(db)
            known: list[str] = []
            shown: list[str] = []
            for side in sides:
                columns = [n for n, kind in _columns(db, side) if n not in known and _is_one(kind)]
                shown += [f"{side}.{quoted(name)}" for name in columns]
                known += columns
            if "kept" not in known:
                shown += ["true as kept", "'' as reason", 'null::bigint as "group"']
            if "captions" not in known:
                shown += ["null::varchar as captions", "null::varchar as bad"]
            joined = "".join(f" left join {side} using (tar, row)" for side in sides[1:])
            db.execute(
                f"create temp table entries as select {', '.join(shown)} "
                f"from {sides[0]}{joined} where {where} order by tar, row"
            )
            yield db

    @property
    def described(self) -> list[str]:
        """The columns of the descriptions that people read: no embeddings and hashes."""
        if "describe" not in self.artifacts:
            return []
        described = self.artifacts["describe"]
        kinds = described.manifest["settings"]["describers"]
        return [
            column
            for name, values in described.summary["values"].items()
            for column, value in values.items()
            if (kinds[name]["kind"], value) != EMBEDDING and kinds[name]["kind"] != "hash"
        ]

    def _described(self, db: duckdb.DuckDBPyConnection) -> list[str]:
        if not self.described:
            return []
        described(self.artifacts["describe"], db, self.described)
        return ["kiln_described"]

    def _selection(self, db: duckdb.DuckDBPyConnection) -> list[str]:
        if "select" not in self.artifacts:
            return []
        db.register("selection", read_selection(self.artifacts["select"]))
        return ["selection"]

    def _captions(self, db: duckdb.DuckDBPyConnection) -> list[str]:
        if "caption" not in self.artifacts:
            return []
        schema = pa.schema(
            [("tar", pa.string()), ("row", pa.int32())]
            + [(name, pa.string()) for name in ("captions", "bad")]
        )

        def batches() -> Iterator[pa.RecordBatch]:
            for tar, table in tables_of(self.artifacts["caption"]).items():
                rows = [
                    {
                        "tar": tar,
                        "row": row,
                        "captions": json.dumps(dict(sample.texts)),
                        "bad": json.dumps(dict(sample.reasons)),
                    }
                    for row, sample in enumerate(read_captions(table["url"], table["sha256"]))
                    if sample.reasons is not None
                ]
                yield pa.RecordBatch.from_pylist(rows, schema)

        reader = pa.RecordBatchReader.from_batches(schema, batches())
        db.register("caption_reader", reader)
        db.execute("create temp table caption_side as from caption_reader")
        return ["caption_side"]

    def encoded(self, tars: Collection[str] | None = None) -> Iterator[Encoded]:
        """The pictures of the latent shards, without the mirrored copies; none before encoding.

        Args:
            tars: sha256 of the image shards whose pictures are asked for; None: of all.
        """
        latents = self.artifacts.get("encode")
        for entry in [] if latents is None else latents.files:
            is_asked = tars is None or entry.meta.get("tar", next(iter(tars), None)) in tars
            if latents is not None and entry.path.endswith(".safetensors") and is_asked:
                name = PurePosixPath(entry.path).name
                key = name.partition(".")[0]
                out = self.left_out.get(key, {})
                ids = read_ids(latents.store.fs, f"{latents.store.shards_path('encode')}/{name}")
                for group, of_group in ids.items():
                    rows = out.get(group, {})
                    for row, picture in enumerate(of_group):
                        yield Encoded(picture, key, group, row, rows.get(row))

    @cached_property
    def left_out(self) -> LeftOut:
        """The encoded pictures that training leaves out."""
        latents = self.artifacts["encode"]
        return read_left_out(latents.store.fs, latents.path, latents.files)

    def captions(self, caption: str | None, made: str | None, bad: str | None) -> tuple[str, ...]:
        """What training reads of a picture's captions; empty if it leaves the picture out.

        Args:
            caption: the source's; None if it has none.
            made, bad: columns of `entries`; None if the picture was not captioned.
        """
        if "caption" not in self.artifacts:
            return (caption or "",)
        sample = CaptionedSample(b"", {})
        if made is not None and bad is not None:
            sample = CaptionedSample(b"", json.loads(made), (), json.loads(bad))
        return captions_to_train(sample, (caption or "",), self._rule) or ()

    @cached_property
    def _rule(self) -> Rule:
        return Rule.read(self.artifacts["caption"])

    @cached_property
    def transform(self) -> TransformSettings:
        """The settings by which pictures were cropped."""
        settings = self.artifacts["encode"].manifest["settings"]
        names = {field.name for field in fields(TransformSettings)}
        return TransformSettings(**{n: value for n, value in settings.items() if n in names})

    @cached_property
    def pixels_per_latent(self) -> int:
        """The scale of the VAE."""
        return int(json.loads(self.artifacts["encode"].read(INFO))["vae_scale_factor"])


def column_facts(data: DataSet, columns: Sequence[str], holdout: float) -> list[dict[str, Any]]:
    """Rows of a table: what the columns of a source say of the pictures trained on.

    Args:
        columns: of `entries`.
        holdout: fraction of the pictures in the held-out split.
    """
    groups = (group for shard in data.left_out.values() for group in shard.values())
    copies = {sha256 for rows in groups for sha256 in rows.values()}
    with data.opened() as db:
        hex_ids = copies - {NOT_SELECTED, BAD_REFERENCE}
        ids = pa.array([bytes.fromhex(sha256) for sha256 in hex_ids], pa.binary())
        db.register("copies", pa.table({"id": ids}))
        place = "('0x' || left(hex(id), 16))::ubigint / 2.0 ** 64"
        db.execute(
            f"create temp view trained as from entries where kept and {place} >= {holdout!r} "
            "and id not in (from copies)"
        )
        known = set(numbers(db))
        return [
            _facts_of(db, column, is_number=column in known) for column in columns[:SHOWN_COLUMNS]
        ]


def _facts_of(db: duckdb.DuckDBPyConnection, column: str, *, is_number: bool) -> dict[str, Any]:
    name = quoted(column)
    if is_number:
        values = f"count({name}), min({name}), avg({name}), max({name})"
        [(count, *three)] = db.execute(f"select {values} from trained").fetchall()
        words = "least {}, mean {}, greatest {}".format(*(human(value) for value in three))
    else:
        values = f"count({name}), count(distinct {name})"
        [(count, distinct)] = db.execute(f"select {values} from trained").fetchall()
        words = f"{human(distinct)} distinct"
    return {"column": column, "pictures with a value": count, "values": words}


def numbers(db: duckdb.DuckDBPyConnection, without: Iterable[str] = ()) -> list[str]:
    """The columns of `entries` that have numbers."""
    hidden = {"row", "group", *without}
    return [
        name
        for name, kind in _columns(db, "entries")
        if is_number(kind) and kind != "BOOLEAN" and name not in hidden
    ]


def _images_of(artifact: Artifact) -> str | None:
    """Digest of the images that an artifact is made from; its own, of images."""
    if artifact.stage == IMAGES:
        return artifact.digest
    inputs: dict[str, Any] = artifact.manifest["inputs"]
    return inputs.get("images")


def _is_newer(artifact: Artifact, other: Artifact | None) -> bool:
    """Whether an artifact of a run is newer; a mixture is newer than its sources."""
    if other is None:
        return True
    made = [("sources" in a.summary, a.manifest["run"]["created"]) for a in (artifact, other)]
    return made[0] >= made[1]


def _named(db: duckdb.DuckDBPyConnection, name: str, rows: duckdb.DuckDBPyRelation) -> str:
    rows.create_view(name)
    return name


def _columns(db: duckdb.DuckDBPyConnection, table: str) -> list[tuple[str, str]]:
    described = db.execute(f"describe {table}").fetchall()
    return [(name, kind) for name, kind, *_ in described]


def _is_one(kind: str) -> bool:
    """Whether a column has one value that people read, or that identifies the picture."""
    return not kind.endswith("]") and not kind.startswith(("STRUCT", "MAP"))
