"""Download one shard of rows into a committed tar and parquet, or defer it after an outage.

Each row's picture is fetched, checked, and resized by img2dataset. The resized pictures are kept
until the shard's tar is written.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from artifacts.image_shards import ADDITIONAL, Sample, read_rows, read_tar, write_rows, write_tar
from artifacts.records import canonical_json, digest_bytes, digest_json, read_checked
from artifacts.store import Shard, Store
from configs.errors import Refused
from configs.secrets import without_secrets
from configs.settings.data import Download
from tasks.download.data_quality import most_common, shard_statistics
from tasks.download.decode import PictureResizer
from tasks.download.fetch_with_retries import Fetcher, run
from tasks.download.http import OF_CONTROL, OF_MASK, FetchFailed, Room, is_transient
from tasks.download.lists import PictureLocation, ServedAt
from tasks.download.politeness import is_opted_out, is_outage
from tasks.download.rows import ALPHA, Row, read_additional
from tasks.download.shard_plan import (
    ShardSpec,
    distrust_file,
    name_of_rows,
    read_spans,
    rows_digest,
)
from tasks.download.sources import SOURCES


class ResizedPictures:
    """Pictures by the numbers of their rows, in one file; a file of each costs half a millisecond.

    Any thread may add a picture.
    """

    def __init__(self, file: Path) -> None:
        self._file: BinaryIO = file.open("w+b", buffering=0)
        self._places: dict[int, tuple[int, int]] = {}  # row -> (offset, bytes)
        self._lock = threading.Lock()

    def __enter__(self) -> ResizedPictures:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:  # a write after the close of its file could hit another one's descriptor
            self._file.close()

    def add(self, row: int, picture: bytes) -> None:
        """Append the picture of a row, instead of an earlier picture.

        Raises:
            OSError: the disk is full.
            ValueError: the pictures are closed, as when a run is interrupted.
        """
        with self._lock:
            place = (self._file.seek(0, 2), len(picture))
            rest = memoryview(picture)
            while rest:  # a full disk takes a part of it first
                rest = rest[self._file.write(rest) :]
            self._places[row] = place

    def __contains__(self, row: int) -> bool:
        return row in self._places

    def read(self, row: int) -> bytes:
        """The picture of a row. Raises KeyError if it has none."""
        offset, size = self._places[row]
        with self._lock:
            self._file.seek(offset)
            return self._file.read(size)


class Kept(NamedTuple):
    """The resized pictures of a shard, with the masks and the control pictures beside them."""

    pictures: ResizedPictures
    masks: ResizedPictures
    controls: ResizedPictures


class RowDownloader:
    """Downloads the rows of a shard, while its `fetcher` is open."""

    def __init__(self, settings: Download, served_at: ServedAt) -> None:
        self.resizer = PictureResizer(settings)
        self.fetcher = Fetcher(settings, served_at)
        self.shared = self.fetcher.shared
        self.opt_outs = {value.strip().lower() for value in settings.opt_out_headers}

    async def download(
        self,
        row: Row,
        keep: Callable[[bytes], None],
        keep_mask: Callable[[bytes], None],
        keep_control: Callable[[bytes], None],
    ) -> dict[str, Any]:
        """Fetch and resize a row's picture, then its mask and its control picture.

        Args:
            keep: receives the resized picture, in a thread of the decoders.
            keep_mask: receives its resized mask, if it has one, in the same way.
            keep_control: receives its resized control picture, in the same way.

        Returns the row's outcome:
            `status` (img2dataset's success, failed_to_download or failed_to_resize), then
            `error_message` and `attempts` (requests), or the four sizes in pixels and the fetched
            bytes' `sha256` (hex) and number (`bytes`).

        Raises what `keep` raises.
        """
        resize = partial(self._resize, keep=keep, keep_alpha=None)
        if row.mask is not None and row.mask.url == ALPHA:
            resize = partial(self._resize, keep=keep, keep_alpha=keep_mask)
        facts = await self._fetch(row, resize)
        if facts["status"] != "success":
            return facts
        size = facts["original_width"], facts["original_height"]
        has_mask = row.mask is not None and row.mask.url != ALPHA
        # The picture is kept first: rows that wait for memory with bodies of theirs wait in a ring.
        for beside, resize_beside, keep_beside, of in (
            (row.mask if has_mask else None, self.resizer.resize_mask, keep_mask, OF_MASK),
            (row.control, self.resizer.resize_control, keep_control, OF_CONTROL),
        ):
            if beside is None:
                continue
            keeping = partial(_resize_beside, resize=resize_beside, size=size, keep=keep_beside)
            fetched = await self._fetch(beside, keeping)
            if fetched["status"] != "success":
                return {**fetched, "error_message": of + fetched["error_message"]}
            facts["bytes"] += fetched["bytes"]
        return facts

    async def _fetch(
        self, row: Row, resize: Callable[[bytes], dict[str, Any] | str]
    ) -> dict[str, Any]:
        """The outcome of a picture or mask: what `resize` returns of its body, or its failure."""
        attempts = 0
        try:
            with Room(self.shared.bodies) as room:
                body, headers, attempts = await self.fetcher.get(row, room)
                if is_opted_out(headers, self.fetcher.token, self.opt_outs):
                    raise FetchFailed("opted out")
                loop = asyncio.get_running_loop()
                facts = await loop.run_in_executor(self.shared.decoders, resize, body)
        except FetchFailed as failure:
            return _failed("failed_to_download", failure.reason, attempts or failure.attempts)
        if isinstance(facts, str):
            return _failed("failed_to_resize", facts, attempts)
        return {"status": "success", **facts, "bytes": len(body)}

    def _resize(
        self, body: bytes, keep: Callable[[bytes], None], keep_alpha: Callable[[bytes], None] | None
    ) -> dict[str, Any] | str:
        """Keep the resized picture, and its alpha. Returns sizes and sha256, or why it failed."""
        resized = self.resizer.resize(body)
        if isinstance(resized, str):
            return resized
        sizes = asdict(resized)
        keep(sizes.pop("picture"))
        if keep_alpha is not None:
            size = resized.original_width, resized.original_height
            if (alpha := self.resizer.resize_alpha(body, *size)) is not None:
                keep_alpha(alpha)
        return {**sizes, "sha256": digest_bytes(body)}


def _resize_beside(
    body: bytes,
    resize: Callable[[bytes, int, int], bytes],
    size: tuple[int, int],
    keep: Callable[[bytes], None],
) -> dict[str, Any]:
    keep(resize(body, *size))
    return {}


def _failed(status: str, reason: str, attempts: int) -> dict[str, Any]:
    return {"status": status, "error_message": reason, "attempts": attempts}


#: Rows of a shard in flight per connection: most of them wait for their hosts.
ROWS_PER_CONNECTION = 4
STAGE = "download"
VERSION = 10


@dataclass(frozen=True)
class DownloadContext:
    """The inputs that all shards of a run share; pickled to the workers."""

    store: str  # URL
    notes: str  # folder in the store for the notes of deferred shards
    source: Any  # the recipe's source section
    settings: Download
    served_at: ServedAt
    plan_key: str = field(repr=False)  # of shard_plan.plan_key
    reports: str = ""  # folder in the store for the workers' reports
    rows: int = 0  # of the whole plan
    retry_run: str | None = None  # the run that fetches rows with transient failures again


@dataclass(frozen=True)
class Deferred:
    """A shard that was not committed because of an outage; the next run retries it."""

    key: str
    reasons: dict[str, int]  # failure reason -> number of rows


def all_reasons(deferred: Sequence[Deferred]) -> str:
    """The most common failure reasons of deferred shards, with their numbers of rows."""
    return most_common(sum((Counter(shard.reasons) for shard in deferred), Counter()))


def shard_key(settings: Download) -> Callable[[str], str]:
    """Function from the digest (sha256 hex) of a shard's row hashes to its key (sha256 hex)."""
    chosen = {n: value for n, value in settings.key_settings().items() if n != "shard_size"}
    common = digest_json({"stage": STAGE, "version": VERSION, "settings": chosen})
    return lambda rows: digest_bytes(f"{common} {rows}".encode())


def download_shard(spec: ShardSpec, context: DownloadContext) -> Shard | Deferred:
    """The shard from the store if it is intact, else downloaded and committed.

    Its rows with transient failures are fetched again, once by the run `context.retry_run`.

    Raises:
        OSError: the store is full or not writable.
        Refused: the source changed since it was scanned, or cannot be read.
        Away: it cannot be read now.
    """
    store = Store(context.store)
    # No record of a damaged shard may stay if this fails.
    present = store.shard(STAGE, spec.key, discard=True)
    if present is not None and not is_retried(present.meta, context):
        return present
    with tempfile.TemporaryDirectory(prefix="kiln-") as folder:
        shard = _download(spec, context, present, Path(folder))
    # Rows leave cycles of tasks, errors and frames, which Python finds late. A search of young
    # objects only would keep what was in flight at the search before: 360 MiB in 100,000 rows.
    gc.collect()
    return shard


def _download(
    spec: ShardSpec, context: DownloadContext, present: Shard | None, scratch: Path
) -> Shard | Deferred:
    store = Store(context.store)
    with (
        ResizedPictures(scratch / "pictures") as pictures,
        ResizedPictures(scratch / "masks") as masks,
        ResizedPictures(scratch / "controls") as controls,
    ):
        kept_pictures = Kept(pictures, masks, controls)
        earlier = [] if present is None else _outcomes(store, present, kept_pictures)
        rows = planned_rows(spec, context, scratch)
        outcomes, costs = _download_rows(rows, earlier, context, kept_pictures)
        failures = [outcome.get("error_message") for outcome in outcomes]
        reasons = Counter(failures)
        if is_outage([row.url for row in rows], failures, context.settings.max_transient):
            return Deferred(spec.key, {r: n for r, n in reasons.items() if r and is_transient(r)})
        kept = bool(getattr(context.source, "additional_columns", ()))
        described = [
            _described(spec.key, number, row, outcome, additional=kept)
            for number, (row, outcome) in enumerate(zip(rows, outcomes, strict=True))
        ]
        samples = _samples(described, rows, kept_pictures, context.settings.encode_format)
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
    rows = name_of_rows(rows_digest(row["hash"] for row in planned), spec.repeat)
    if shard_key(context.settings)(rows) != spec.key:
        for file in {span.file for span in spec.spans}:
            distrust_file(file)
        raise Refused(f"source: its shard plan {spec.spans[0].file} is damaged: run again")
    source = SOURCES[context.source.kind](context.source)
    pictures = source.pictures(
        PictureLocation(row["file"], row["row"]) for row in planned if row["file"] is not None
    )
    beside = {
        "mask": source.masks(_places(planned, "mask")),
        "control": source.controls(_places(planned, "control")),
    }
    return [
        Row(
            row["url"],
            tuple(row["captions"]),
            row["sha256"],
            row["aesthetic_score"],
            row["file"]
            and _copied(next(pictures, None), row["sha256"], scratch / f"source-{number}"),
            row["hash"].hex(),
            read_additional(row["additional"]),
            place_of(row["file"], row["row"]),
            *(
                row[name] and _row_beside(row[name], beside[name], scratch / f"{name}-{number}")
                for name in ("mask", "control")
            ),
        )
        for number, row in enumerate(planned)
    ]


def _places(planned: Sequence[Mapping[str, Any]], name: str) -> Iterator[PictureLocation]:
    """Where the source has the embedded pictures of a column, of those rows that have one."""
    for row in planned:
        place = row[name]
        if place is not None and place["file"] is not None:
            yield PictureLocation(place["file"], place["row"])


def _row_beside(place: Mapping[str, Any], embedded: Iterator[bytes | None], copy: Path) -> Row:
    """The row of a mask or control picture; one embedded in the source is copied to `copy`."""
    if place["file"] is None:
        return Row(place["url"], ())
    sha256 = place["url"].removeprefix("sha256:")
    return Row(place["url"], (), sha256, file=_copied(next(embedded, None), sha256, copy))


def place_of(file: str | None, row: int | None) -> str:
    """Where a source has an embedded picture, for people."""
    return (file or "") if row is None else f"{file} at {row}"


def _copied(picture: bytes | None, sha256: str, file: Path) -> str:
    """The copy of an embedded picture, or of one beside it, which must be the planned one."""
    if picture is None or digest_bytes(picture) != sha256:
        raise Refused("source: it changed while it was being read: run again")
    file.write_bytes(picture)
    return str(file)


def _download_rows(
    rows: Sequence[Row], earlier: list[dict[str, Any]], context: DownloadContext, kept: Kept
) -> tuple[list[dict[str, Any]], list[tuple[float, int]]]:
    """The outcome of every row: the earlier outcome, or a new one after a transient failure.

    Beside them the seconds and the fetched bytes of every row.

    Args:
        earlier: outcomes of all rows at an earlier download; empty for the first download.
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
            keeping = (partial(pictures.add, number) for pictures in kept)
            try:
                facts = await downloader.download(rows[number], *keeping)
            except Exception as error:
                failed.append(error)
                return {}, (0.0, 0)
        if "attempts" in facts:
            facts["attempts"] += before.get("attempts", 0)
        return facts, (time.monotonic() - begun, facts.pop("bytes", 0))

    async def outcomes() -> list[tuple[dict[str, Any], tuple[float, int]]]:
        async with downloader.fetcher:
            beside = (other for row in fetched.values() for other in (row.mask, row.control))
            listed = (other for other in beside if other is not None and other.url != ALPHA)
            downloader.fetcher.expect([*fetched.values(), *listed])
            return await asyncio.gather(*map(outcome, range(len(rows))))

    downloaded = run(outcomes())
    if failed:  # not before all rows ended: no decoder may add to `pictures` when they are closed
        raise failed[0]
    return [outcome for outcome, _ in downloaded], [cost for _, cost in downloaded]


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


def _outcomes(store: Store, shard: Shard, kept: Kept) -> list[dict[str, Any]]:
    """The outcome of each row of a shard, whose pictures are added to these."""
    files = {entry.path.rpartition(".")[2]: entry for entry in shard.files}
    tar = store.shard_url(STAGE, files["tar"].path)
    for sample in read_tar(tar, files["tar"].sha256):
        number = int(sample.key.rpartition("_")[2])
        for pictures, data in zip(kept, (sample.image, sample.mask, sample.control), strict=True):
            if data is not None:
                pictures.add(number, data)
    parquet = files["parquet"]
    root = store.shards_path(STAGE)
    rows = read_rows(read_checked(store.fs, root, parquet.path, parquet.sha256))
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def _samples(
    described: Sequence[dict[str, Any]], rows: Sequence[Row], kept: Kept, extension: str
) -> Iterator[Sample]:
    for number, (row, meta) in enumerate(zip(rows, described, strict=True)):
        if meta["status"] == "success":
            score = {} if row.aesthetic_score is None else {"aesthetic_score": row.aesthetic_score}
            own = {name: value for name, value in meta.items() if name != ADDITIONAL}
            meta = {**row.additional, **own, **score}
            picture = kept.pictures.read(number)
            beside = (some.read(number) if number in some else None for some in kept[1:])
            yield Sample(own["key"], picture, extension, row.captions, meta, *beside)
