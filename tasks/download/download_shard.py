"""Download one shard of rows into a committed tar and parquet, or defer it after an outage."""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from artifacts.image_shards import (
    ADDITIONAL,
    Sample,
    read_rows,
    read_tar,
    write_rows,
    write_tar,
)
from artifacts.records import canonical_json, digest_bytes, digest_json, read_checked
from artifacts.store import Shard, Store
from configs.secrets import without_secrets
from configs.settings.data import Download
from tasks.download.duplicates_hosts_and_sizes import shard_statistics
from tasks.download.event_loop import run
from tasks.download.fetch_and_resize_row import RowDownloader
from tasks.download.plan_parquet import distrust_file
from tasks.download.plan_shards import ShardSpec, read_spans, rows_digest
from tasks.download.resized_pictures import ResizedPictures
from tasks.download.retryable_and_final_failures import is_transient
from tasks.download.row_fields_and_hash import Row, read_additional
from tasks.download.skip_dead_web_hosts import is_outage
from tasks.download.source_protocol import PictureLocation, ServedAt
from tasks.download.sources import SOURCES
from tasks.download.stage_errors import SourceError

#: Rows of a shard in flight per connection: most of them wait for their hosts.
ROWS_PER_CONNECTION = 4
STAGE = "download"
VERSION = 9
#: Settings that affect how a download runs, not its result: not part of a shard's key.
NOT_IN_KEY = {
    "max_connections",
    "max_connections_per_host",
    "max_requests_per_host",
    "contact",
    "timeout",
    "deadline",
    "retries",
    "backoff",
    "max_failed",
    "max_duplicates",
    "min_caption_length",
    "max_short_captions",
    "max_undersized",
    "max_transient",
    "max_host_failures",
    "retry_failed",
    "beam",
}


@dataclass(frozen=True)
class DownloadContext:
    """The inputs that all shards of a run share; pickled to the workers."""

    store: str  # URL
    notes: str  # folder in the store for the notes of deferred shards
    source: Any  # the recipe's source section
    settings: Download
    served_at: ServedAt
    plan_key: str = field(repr=False)  # of plan_parquet.plan_key
    reports: str = ""  # folder in the store for the workers' reports
    rows: int = 0  # of the whole plan
    retry_run: str | None = None  # the run that fetches rows with transient failures again


@dataclass(frozen=True)
class Deferred:
    """A shard that was not committed because of an outage; the next run retries it."""

    key: str
    reasons: dict[str, int]  # failure reason -> number of rows


def shard_settings(settings: Download) -> dict[str, Any]:
    """The settings that affect a shard's bytes, given its rows."""
    return settings.model_dump(mode="json", exclude={*NOT_IN_KEY, "shard_size"})


def shard_key(settings: Download) -> Callable[[str], str]:
    """Function from the digest (sha256 hex) of a shard's row hashes to its key (sha256 hex)."""
    parts = {"stage": STAGE, "version": VERSION, "settings": shard_settings(settings)}
    common = digest_json(parts)
    return lambda rows: digest_bytes(f"{common} {rows}".encode())


def download_shard(spec: ShardSpec, context: DownloadContext) -> Shard | Deferred:
    """The shard from the store if it is intact, else downloaded and committed.

    Its rows with transient failures are fetched again, once by the run `context.retry_run`.

    Raises:
        OSError: the store is full or not writable.
        SourceError: the source changed since it was scanned, or cannot be read.
        SourceAway: it cannot be read now.
    """
    store = Store(context.store)
    # No record of a damaged shard may stay if this fails.
    present = store.shard(STAGE, spec.key, discard=True)
    if present is not None and not is_retried(present.meta, context):
        return present
    with (
        tempfile.TemporaryDirectory(prefix="kiln-") as folder,
        ResizedPictures(Path(folder, "pictures")) as pictures,
    ):
        shard = _download(spec, context, store, present, Path(folder), pictures)
    # Rows leave cycles of tasks, errors and frames, which Python finds late. A search of young
    # objects only would keep what was in flight at the search before: 360 MiB in 100,000 rows.
    gc.collect()
    return shard


def _download(
    spec: ShardSpec,
    context: DownloadContext,
    store: Store,
    present: Shard | None,
    scratch: Path,
    pictures: ResizedPictures,
) -> Shard | Deferred:
    earlier = [] if present is None else _outcomes(store, present, pictures)
    rows = planned_rows(spec, context, scratch)
    outcomes, costs = _download_rows(rows, earlier, context, pictures)
    failures = [outcome.get("error_message") for outcome in outcomes]
    reasons = Counter(failures)
    if is_outage([row.url for row in rows], failures, context.settings.max_transient):
        return Deferred(spec.key, {r: n for r, n in reasons.items() if r and is_transient(r)})
    kept = bool(getattr(context.source, "additional_columns", ()))
    described = [
        _described(spec.key, number, row, outcome, additional=kept)
        for number, (row, outcome) in enumerate(zip(rows, outcomes, strict=True))
    ]
    samples = _samples(described, rows, pictures, context.settings.encode_format)
    count = write_tar(scratch / "shard.tar", samples)
    write_rows(scratch / "shard.parquet", described, additional=kept)
    counts = {reason or "success": n for reason, n in reasons.items()}
    meta = {
        "samples": count,
        "outcomes": dict(sorted(counts.items())),
        "retries": 0 if present is None else present.meta["retries"] + 1,
        "retry_run": None if present is None else context.retry_run,
        **shard_statistics(
            *(rows, outcomes, costs, context.settings, context.rows),
            earlier=None if present is None else present.meta,
            base_url=context.served_at.base_url,
        ),
    }
    files = {suffix: str(scratch / f"shard{suffix}") for suffix in (".tar", ".parquet")}
    return store.commit_shard(STAGE, spec.key, files, meta)


def _described(
    key: str, number: int, row: Row, outcome: Mapping[str, Any], *, additional: bool
) -> dict[str, Any]:
    """A row of a shard's parquet file."""
    return {
        **outcome,
        "key": f"{key[:12]}_{number:05d}",
        "url": without_secrets(row.url),
        "caption": row.captions[0],
        "row_hash": row.hash,
        **({ADDITIONAL: canonical_json(row.additional).decode()} if additional else {}),
    }


def planned_rows(spec: ShardSpec, context: DownloadContext, scratch: Path) -> list[Row]:
    """The planned rows of a shard; their embedded pictures are copied to `scratch`."""
    planned = read_spans(spec.spans, context.plan_key).to_pylist()
    if shard_key(context.settings)(rows_digest(row["hash"] for row in planned)) != spec.key:
        for file in {span.file for span in spec.spans}:
            distrust_file(file)
        raise SourceError(f"source: its shard plan {spec.spans[0].file} is damaged: run again")
    source = SOURCES[context.source.kind](context.source)
    places = (
        PictureLocation(row["file"], row["row"]) for row in planned if row["file"] is not None
    )
    pictures = source.pictures(places)
    return [
        Row(
            row["url"],
            tuple(row["captions"]),
            row["sha256"],
            row["aesthetic_score"],
            row["file"] and _copied(next(pictures, None), row["sha256"], scratch, number),
            row["hash"].hex(),
            read_additional(row["additional"]),
            _place(row["file"], row["row"]),
        )
        for number, row in enumerate(planned)
    ]


def _place(file: str | None, row: int | None) -> str:
    """Where a source has an embedded picture, for people."""
    return (file or "") if row is None else f"{file} at {row}"


def _copied(picture: bytes | None, sha256: str, scratch: Path, number: int) -> str:
    """The copy of an embedded picture, which must be the planned one."""
    if picture is None or digest_bytes(picture) != sha256:
        raise SourceError("source: it changed while it was being read: run again")
    file = scratch / f"source-{number}"
    file.write_bytes(picture)
    return str(file)


def _download_rows(
    rows: Sequence[Row],
    earlier: list[dict[str, Any]],
    context: DownloadContext,
    pictures: ResizedPictures,
) -> tuple[list[dict[str, Any]], list[tuple[float, int]]]:
    """The outcome of every row: the earlier one, unless it is a transient failure, or a new one.

    Beside them the seconds and the fetched bytes of every row.

    Args:
        earlier: outcomes of all rows at an earlier download; empty for the first one.
    """
    downloader = RowDownloader(context.settings, context.served_at)
    in_flight = asyncio.Semaphore(ROWS_PER_CONNECTION * context.settings.max_connections)
    failed: list[BaseException] = []
    fetched = {
        number: row
        for number, row in enumerate(rows)
        if not earlier or is_transient(earlier[number].get("error_message", ""))
    }

    async def outcome(number: int) -> tuple[dict[str, Any], tuple[float, int]]:
        before = earlier[number] if earlier else {}
        if number not in fetched:
            return before, (0.0, 0)
        async with in_flight:
            if failed:
                return {}, (0.0, 0)
            begun = time.monotonic()
            try:
                found = await downloader.download(rows[number], partial(pictures.add, number))
            except Exception as error:
                failed.append(error)
                return {}, (0.0, 0)
        if "attempts" in found:
            found["attempts"] += before.get("attempts", 0)
        return found, (time.monotonic() - begun, found.pop("bytes", 0))

    async def outcomes() -> list[tuple[dict[str, Any], tuple[float, int]]]:
        async with downloader:
            downloader.fetcher.expect(fetched.values())
            return await asyncio.gather(*map(outcome, range(len(rows))))

    found = run(outcomes())
    if failed:  # not before all rows ended: no decoder may add to `pictures` when they are closed
        raise failed[0]
    return [outcome for outcome, _ in found], [cost for _, cost in found]


def is_retried(meta: Mapping[str, Any], context: DownloadContext) -> bool:
    """Whether the run fetches rows of a shard again.

    Not if it has: a later try of the run, after an outage of other shards, is no further run.
    """
    run = context.retry_run
    return run not in (None, meta.get("retry_run")) and may_retry(meta, context.settings)


def may_retry(meta: Mapping[str, Any], settings: Download) -> bool:
    """Whether a shard has transient failures and a retry left, by the facts of its record."""
    is_failed = any(map(is_transient, meta["outcomes"]))
    return is_failed and bool(meta["retries"] < settings.retry_failed)


def _outcomes(store: Store, shard: Shard, pictures: ResizedPictures) -> list[dict[str, Any]]:
    """The outcome of each row of a shard, whose pictures are added to `pictures`."""
    files = {entry.path.rpartition(".")[2]: entry for entry in shard.files}
    tar = store.shard_url(STAGE, files["tar"].path)
    for sample in read_tar(tar, files["tar"].sha256):
        pictures.add(int(sample.key.rpartition("_")[2]), sample.image)
    parquet, root = files["parquet"], store.shards_path(STAGE)
    rows = read_rows(read_checked(store.fs, root, parquet.path, parquet.sha256))
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def _samples(
    described: Sequence[dict[str, Any]],
    rows: Sequence[Row],
    pictures: ResizedPictures,
    extension: str,
) -> Iterator[Sample]:
    for number, (row, meta) in enumerate(zip(rows, described, strict=True)):
        if meta["status"] == "success":
            score = {} if row.aesthetic_score is None else {"aesthetic_score": row.aesthetic_score}
            own = {name: value for name, value in meta.items() if name != ADDITIONAL}
            meta = {**row.additional, **own, **score}
            yield Sample(own["key"], pictures.read(number), extension, row.captions, meta)
