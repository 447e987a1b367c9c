"""Changes of a source since the champion: rows are new or removed, shards kept or new."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np

from artifacts.image_shards import read_rows
from artifacts.records import Damaged, FileEntry, digest_json, read_checked
from artifacts.store import SHARDS, Artifact, Store
from configs.settings.data import Download
from tasks.download.rows import shard_ends
from tasks.download.shard import STAGE, shard_key
from tasks.download.shard_plan import (
    DownloadPlan,
    ShardSpec,
    Span,
    join_spans,
    planned_hashes,
    rows_digest,
)
from tasks.retrain.champion import Champion

Rows = dict[bytes, Span]  # row hash -> its place in the source
log = logging.getLogger("kiln")


@dataclass(frozen=True)
class Changes:
    """The difference between a source and the images of the champion."""

    source: str  # sha256 (hex) over the hashes of all rows, in order
    rows: int
    new_rows: int
    removed_rows: int = 0
    rows_to_fetch: int = 0  # new rows, and those of shards that lost a row
    kept_shards: int = 0
    new_shards: int = 0


@dataclass
class _Compared:
    """A source beside the champion's shards."""

    settings: Download
    kept: dict[str, ShardSpec]  # key -> a shard that the champion has, too
    rest: Rows  # rows outside the kept shards

    def match(self, key: str, hashes: list[bytes]) -> bool:
        """Keep an old shard with other neighbours now, if the source has all of its rows."""
        if not hashes or not all(row_hash in self.rest for row_hash in hashes):
            return False
        spec = _spec(self.settings, [(row_hash, self.rest[row_hash]) for row_hash in hashes])
        if spec.key != key:  # other settings
            return False
        self.kept[key] = spec
        return True


def plan_changes(
    settings: Download, store: Store, champion: Champion | None, plan: DownloadPlan
) -> tuple[DownloadPlan, Changes]:
    """The shards to train on, and what changed since the champion.

    The order of rows does not matter. New rows are cut into shards of their own, so that no old row
    is fetched or encoded again, except for the other rows of a shard that lost a row. A repetition
    of an old row may count as new.

    Args:
        plan: the source's rows as they would be cut for a first training.

    Raises:
        Refused: the plan's rows cannot be read.
        Refused: the store lacks the champion's images.
    """
    if champion is None:
        count = len(plan.shards)
        fetched = Changes(plan.source_digest, plan.rows, plan.rows, 0, plan.rows, 0, count)
        return plan, fetched
    images = champion.load(store, STAGE, champion.images)
    old = _row_lists(images)
    kept = {spec.key: spec for spec in plan.shards if spec.key in old}
    rest: Rows = {}
    for row_hash, span in planned_hashes(spec for spec in plan.shards if spec.key not in old):
        rest.setdefault(row_hash, span)  # the first among equal rows, so that spans stay in order
    compared = _Compared(settings, kept, rest)
    matched = set[bytes]()
    lost = set[bytes]()
    for key in sorted(old.keys() - kept.keys()):
        hashes = _row_hashes(images, old[key])
        (matched if compared.match(key, hashes) else lost).update(hashes)
    fetch = {row_hash: span for row_hash, span in rest.items() if row_hash not in matched}
    cut = _cut(settings, fetch)
    shards = (*compared.kept.values(), *cut)
    layout = digest_json(sorted(shard.key for shard in shards))
    count = sum(shard.rows for shard in shards)
    return replace(plan, rows=count, shards=shards, layout=layout), Changes(
        source=plan.source_digest,
        rows=plan.rows,
        new_rows=len(fetch.keys() - lost),
        removed_rows=len(lost - rest.keys()),
        rows_to_fetch=len(fetch),
        kept_shards=len(compared.kept),
        new_shards=len(cut),
    )


def _cut(settings: Download, rows: Rows) -> list[ShardSpec]:
    """Shards of rows, the last of which may be small."""
    prefixes = [int.from_bytes(row_hash[:4], "big") for row_hash in rows]
    ends = shard_ends(np.array(prefixes, np.uint32), settings.shard_size)
    items = list(rows.items())
    starts = [0, *ends]
    parts = [items[a:b] for a, b in zip(starts, [*ends, len(items)], strict=True)]
    return [_spec(settings, part) for part in parts if part]


def _spec(settings: Download, rows: list[tuple[bytes, Span]]) -> ShardSpec:
    key = shard_key(settings)(rows_digest(row_hash for row_hash, _ in rows))
    return ShardSpec(key, len(rows), join_spans(span for _, span in rows))


def _row_lists(images: Artifact) -> dict[str, FileEntry]:
    """Key of each shard -> its parquet."""
    listed = [entry for entry in images.files if entry.path.endswith(".parquet")]
    return {entry.path.removeprefix(f"../{SHARDS}/").partition(".")[0]: entry for entry in listed}


def _row_hashes(images: Artifact, entry: FileEntry) -> list[bytes]:
    """The hashes of a shard's rows, in order; none of a damaged shard, which is fetched again."""
    try:
        data = read_checked(images.store.fs, images.path, entry.path, entry.sha256)
    except (Damaged, FileNotFoundError) as error:
        log.warning("retrain: %s; its rows count as new", error)
        return []
    return [bytes.fromhex(row["row_hash"]) for row in read_rows(data)]
