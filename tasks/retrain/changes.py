"""What changed in a source since the champion: new and removed rows, kept and new shards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from artifacts.digests import digest_json
from artifacts.image_shards import read_rows
from artifacts.store import SHARDS, Artifact, Store
from configs.recipe import Recipe
from tasks.download import stage as download
from tasks.download.download_shard import STAGE, ShardSpec, shard_key
from tasks.download.errors import SourceError
from tasks.download.parquet_csv_jsonl import Span, join_spans
from tasks.download.shard_boundaries import cut_shards
from tasks.download.sources import SOURCES
from tasks.retrain.champion import Champion

Rows = dict[str, Span]  # row hash -> its place in the source


@dataclass(frozen=True)
class Changes:
    """The difference between a source and the images of the champion."""

    source: str  # sha256 (hex) over the hashes of all rows, in order
    rows: int
    new_rows: int
    removed_rows: int = 0
    rows_to_fetch: int = 0  # new ones, and those of shards that lost a row
    kept_shards: int = 0
    new_shards: int = 0


@dataclass
class _Compared:
    """A source beside the champion's shards, during one pass over its rows."""

    recipe: Recipe
    old: set[str]  # keys of the champion's shards
    kept: dict[str, ShardSpec] = field(default_factory=dict)
    rest: Rows = field(default_factory=dict)  # rows outside the kept shards
    digest: str = ""
    rows: int = 0

    def scan(self) -> None:
        """Read the source: shards that the champion has, too, are kept."""
        for shard in cut_shards(self._rows(), self.recipe.download.shard_size):
            key = shard_key(self.recipe.download, (row_hash for row_hash, _ in shard))
            if key in self.old:
                self._keep(key, (span for _, span in shard), len(shard))
            else:
                self.rest.update(shard)

    def _rows(self) -> Iterator[tuple[str, Span]]:
        digest = hashlib.sha256()
        for row_hash, span in SOURCES[self.recipe.source.kind](self.recipe.source).scan():
            digest.update(bytes.fromhex(row_hash))
            self.rows += 1
            yield row_hash, span
        self.digest = digest.hexdigest()

    def match(self, key: str, hashes: list[str]) -> bool:
        """Keep an old shard with other neighbours now, if the source has all of its rows."""
        if not hashes or not all(row_hash in self.rest for row_hash in hashes):
            return False
        if shard_key(self.recipe.download, hashes) != key:  # other settings
            return False
        self._keep(key, (self.rest[row_hash] for row_hash in hashes), len(hashes))
        return True

    def _keep(self, key: str, spans: Iterable[Span], rows: int) -> None:
        self.kept[key] = ShardSpec(key, rows, tuple(join_spans(spans)))


def plan_changes(
    recipe: Recipe, store: Store, champion: Champion | None
) -> tuple[download.Plan, Changes]:
    """The shards to train on, and what changed since the champion.

    The order of rows does not matter. New rows are cut into shards of their own, so that no old row
    is fetched or encoded again, except for the other rows of a shard that lost one. A repetition of
    an old row may count as new.

    Raises:
        SourceError: the source cannot be read, or has no rows.
        WrongInput: the store lacks the champion's images.
    """
    download.check(recipe)
    if champion is None:
        plan = download.plan(recipe)
        count = len(plan.shards)
        fetched = Changes(plan.source_digest, plan.rows, plan.rows, 0, plan.rows, 0, count)
        return plan, fetched
    images = champion.load(store, STAGE, champion.images)
    old = {shard["key"]: shard["rows"] for shard in images.summary["shards"]}
    found = _Compared(recipe, set(old))
    found.scan()
    matched, lost = set[str](), set[str]()
    for key in sorted(old.keys() - found.kept.keys()):
        hashes = _row_hashes(images, key)
        (matched if found.match(key, hashes) else lost).update(hashes)
    fetch = {row_hash: span for row_hash, span in found.rest.items() if row_hash not in matched}
    cut = [_spec(recipe, shard) for shard in cut_shards(fetch.items(), recipe.download.shard_size)]
    shards = (*found.kept.values(), *cut)
    if not shards:
        raise SourceError("source: it has no rows")
    layout = digest_json(sorted(shard.key for shard in shards))
    plan = download.Plan(found.digest, sum(shard.rows for shard in shards), shards, layout)
    return plan, Changes(
        source=found.digest,
        rows=found.rows,
        new_rows=len(fetch.keys() - lost),
        removed_rows=len(lost - found.rest.keys()),
        rows_to_fetch=len(fetch),
        kept_shards=len(found.kept),
        new_shards=len(cut),
    )


def _spec(recipe: Recipe, shard: list[tuple[str, Span]]) -> ShardSpec:
    key = shard_key(recipe.download, (row_hash for row_hash, _ in shard))
    return ShardSpec(key, len(shard), tuple(join_spans(span for _, span in shard)))


def _row_hashes(images: Artifact, key: str) -> list[str]:
    """The hashes of a shard's rows, in order."""
    prefix = f"../{SHARDS}/{key}."
    (path,) = (
        entry.path
        for entry in images.files
        if entry.path.startswith(prefix) and entry.path.endswith(".parquet")
    )
    place = f"{images.store.root}/{STAGE}/{path.removeprefix('../')}"
    return [row["row_hash"] for row in read_rows(images.store.fs.cat_file(place))]
