"""The download stage as the flow sees it: check, plan, build, show."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from typing import Any

from artifacts.commit import read_record
from artifacts.images import read_tar
from artifacts.keys import cut_shards
from artifacts.store import Artifact, Draft, KeyParts, Shard, Store
from configs.schema import Recipe
from tasks.download.download_shard import (
    STAGE,
    VERSION,
    Deferred,
    DownloadContext,
    ShardSpec,
    shard_key,
    shard_settings,
)
from tasks.download.errors import SourceError, TooManyFailed
from tasks.download.lists import Span, join_spans
from tasks.download.sources import SOURCES, Source
from tasks.panels import Facts, Panel, Picture, Table
from tasks.quiet import quiet_import
from tasks.stage import TransientError

NOTES = "left"  # folder in the draft where workers say which shards they left, and why
GRID = (8, 3)  # columns, rows
log = logging.getLogger("kiln")


@dataclass(frozen=True)
class Plan:
    """What a source holds, cut into shards; no rows are kept, only where they are."""

    source_digest: str  # sha256 (hex) over the hashes of all rows, in order
    rows: int
    shards: tuple[ShardSpec, ...]  # in the source's order, each key once


def settings_for_key(recipe: Recipe) -> dict[str, Any]:
    """The settings that change the artifact, besides the source's content."""
    download = recipe.download
    rest = {"shard_size": download.shard_size, "retry_failed": download.retry_failed}
    return {**shard_settings(download), **rest}


def check(recipe: Recipe) -> None:
    """Raise SourceError, cheaply and before any work, unless the source can be used."""
    download = recipe.download
    if download.encode_format == "png" and download.encode_quality > 9:
        raise SourceError(
            "download.encode_quality: for png it is the compression, 0 to 9 "
            f"(got {download.encode_quality})"
        )
    _source(recipe).check()


def plan(recipe: Recipe) -> Plan:
    """Read the source once, and cut it into shards. Raises SourceError."""
    check(recipe)
    digest, rows, shards = hashlib.sha256(), 0, dict[str, ShardSpec]()

    def scanned() -> Iterator[tuple[str, Span]]:
        for row_hash, span in _source(recipe).scan():
            digest.update(bytes.fromhex(row_hash))
            yield row_hash, span

    for shard in cut_shards(scanned(), recipe.download.shard_size):
        key = shard_key(recipe.download, (row_hash for row_hash, _ in shard))
        if key in shards:
            log.warning("download: the same %d rows are listed twice; taken once", len(shard))
            continue
        rows += len(shard)
        shards[key] = ShardSpec(key, len(shard), tuple(join_spans(span for _, span in shard)))
    if not shards:
        raise SourceError("source: it has no rows")
    return Plan(digest.hexdigest(), rows, tuple(shards.values()))


def key_parts(recipe: Recipe, plan: Plan) -> KeyParts:
    """What the pictures depend on: the settings, and every row of the source."""
    return KeyParts(STAGE, VERSION, settings_for_key(recipe), {"source": plan.source_digest})


def build(
    recipe: Recipe, plan: Plan, draft: Draft, progress: Callable[[int, int, str], None]
) -> dict[str, Any]:
    """Bring every shard of the plan into the store and name it in the draft.

    Raises:
        SourceError: the source or the Beam options cannot be used.
        TransientError: shards were left because of an outage; the next run takes up just those.
        TooManyFailed: more rows failed for good than `download.max_failed` allows.
        OSError: the store cannot be written.
    """
    with quiet_import():  # Beam takes seconds to import
        from tasks.download.pipeline import run_pipeline
    store = draft.store
    with _source(recipe).open() as place:
        work = DownloadContext(
            store.url, f"{draft.path}/{NOTES}", recipe.source, recipe.download, place
        )
        left = run_pipeline(plan.shards, work, recipe.beam, progress)
    if left:
        raise TransientError(_outage(left, len(plan.shards)))
    shards = [_committed(store, spec) for spec in sorted(plan.shards, key=lambda spec: spec.key)]
    for shard in shards:
        draft.add_shard(shard)
    summary = _summary(plan, shards)
    _refuse_failures(summary, recipe.download.max_failed)
    return summary


def show(artifact: Artifact) -> list[Panel]:
    """Counts by outcome, and some of the pictures."""
    summary = artifact.summary
    outcomes = Counter(summary["outcomes"]).most_common()
    rows = [{"outcome": o, "rows": n, "share": f"{n / summary['rows']:.1%}"} for o, n in outcomes]
    facts = {"rows": summary["rows"], "images": summary["images"], "shards": len(summary["shards"])}
    panels: list[Panel] = [Facts("Download", facts), Table("Outcomes", rows)]
    tars = [entry.path for entry in artifact.files if entry.path.endswith(".tar")]
    if tars:
        panels.append(Picture("Some of the pictures", _grid(artifact.url(tars[0]))))
    return panels


def _source(recipe: Recipe) -> Source:
    return SOURCES[recipe.source.kind](recipe.source)


def _committed(store: Store, spec: ShardSpec) -> Shard:
    """The shard's record; its files were hashed by the worker that wrote or reused it."""
    record = read_record(store.fs, f"{store.shards_path(STAGE)}/{spec.key}.json")
    if record is None:
        raise RuntimeError(f"download shard {spec.key[:12]}: Beam ended without building it")
    return Shard(spec.key, record["files"], record["meta"])


def _summary(plan: Plan, shards: list[Shard]) -> dict[str, Any]:
    outcomes: Counter[str] = Counter()
    for shard in shards:
        outcomes.update(shard.meta["outcomes"])
    rows = {spec.key: spec.rows for spec in plan.shards}
    return {
        "rows": plan.rows,
        "images": outcomes["success"],
        "outcomes": dict(sorted(outcomes.items())),
        "shards": [
            {"key": shard.key, "samples": shard.meta["samples"], "rows": rows[shard.key]}
            for shard in shards
        ],
    }


def _refuse_failures(summary: dict[str, Any], max_failed: float) -> None:
    rows, failed = summary["rows"], summary["rows"] - summary["images"]
    if failed <= max_failed * rows and summary["images"]:
        return
    why = _top({k: n for k, n in summary["outcomes"].items() if k != "success"})
    allowed = f"download.max_failed allows {max_failed:.0%}"
    raise TooManyFailed(f"download: {failed:,} of {rows:,} rows failed ({why}); {allowed}")


def _outage(left: list[Deferred], shards: int) -> str:
    reasons: Counter[str] = Counter()
    for note in left:
        reasons.update(note.reasons)
    return (
        f"download: {len(left)} of {shards} shards were left after passing failures "
        f"({_top(reasons)}); the others are kept: run again to take up just these, "
        "or raise download.max_transient"
    )


def _top(reasons: dict[str, int]) -> str:
    return ", ".join(f"{reason}: {count:,}" for reason, count in Counter(reasons).most_common(5))


def _grid(tar: str) -> bytes:
    """A PNG of the first pictures of a shard."""
    from PIL import Image, ImageOps

    (columns, rows), side = GRID, 96
    grid = Image.new("RGB", (columns * side, rows * side), "white")
    for place, sample in enumerate(islice(read_tar(tar), columns * rows)):
        with Image.open(BytesIO(sample.image)) as picture:
            thumb = ImageOps.contain(picture.convert("RGB"), (side - 4, side - 4))
        grid.paste(thumb, (place % columns * side + 2, place // columns * side + 2))
    buffer = BytesIO()
    grid.save(buffer, "PNG")
    return buffer.getvalue()
