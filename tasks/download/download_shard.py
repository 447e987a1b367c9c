"""Download one shard of rows into a committed tar and parquet, or defer it after an outage."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from artifacts.images import Sample, write_rows, write_tar
from artifacts.keys import digest_bytes, digest_json
from artifacts.store import Shard, Store
from configs.schema import Download
from configs.urls import without_secrets
from tasks.download.errors import SourceError
from tasks.download.fetch import Fetcher, registered_urls
from tasks.download.lists import Span
from tasks.download.rows import Row
from tasks.download.sources import SOURCES, ServedAt

STAGE = "download"
VERSION = 2
#: Settings that affect how a download runs, not its result: not part of a shard's key.
NOT_IN_KEY = {
    "threads",
    "timeout",
    "deadline",
    "retries",
    "backoff",
    "max_failed",
    "max_transient",
}
#: img2dataset's error message -> the failure reason in our records.
REASONS = {
    "Use of image disallowed by X-Robots-Tag directive": "opted out",
    "Image decoding error": "not an image",
    "image too small": "too small",
    "image area too large": "too many pixels",
}


@dataclass(frozen=True)
class ShardSpec:
    """One shard to download: its key, its row count and the spans of its rows."""

    key: str
    rows: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class DownloadContext:
    """The inputs that all shards of a run share; pickled to the workers."""

    store: str  # URL
    notes: str  # folder in the store for the notes of deferred shards
    source: Any  # the recipe's source section
    settings: Download
    served_at: ServedAt


@dataclass(frozen=True)
class Deferred:
    """A shard that was not committed because of an outage; the next run retries it."""

    key: str
    reasons: dict[str, int]  # failure reason -> number of rows


def shard_settings(settings: Download) -> dict[str, Any]:
    """The settings that affect a shard's bytes, given its rows."""
    return settings.model_dump(mode="json", exclude={*NOT_IN_KEY, "shard_size"})


def shard_key(settings: Download, row_hashes: Iterable[str]) -> str:
    """Key (sha256 hex) of a shard: a digest of its row hashes and `shard_settings`."""
    parts = {
        "stage": STAGE,
        "version": VERSION,
        "settings": shard_settings(settings),
        "rows": list(row_hashes),
    }
    return digest_json(parts)


def download_shard(spec: ShardSpec, context: DownloadContext) -> Shard | Deferred:
    """The shard from the store if it is intact, else downloaded and committed.

    Raises:
        OSError: the store is full or not writable.
        SourceError: the source changed since it was scanned, or cannot be read.
    """
    store = Store(context.store)
    present = store.shard(STAGE, spec.key)
    if present is not None:
        return present
    record = f"{store.shards_path(STAGE)}/{spec.key}.json"
    if store.fs.exists(record):  # damaged: if this attempt fails, no record may remain
        store.fs.rm_file(record)
    with tempfile.TemporaryDirectory(prefix="kiln-") as scratch:
        return _download(spec, context, store, Path(scratch))


def _download(
    spec: ShardSpec, context: DownloadContext, store: Store, scratch: Path
) -> Shard | Deferred:
    rows = list(SOURCES[context.source.kind](context.source).read(spec.spans, scratch))
    if shard_key(context.settings, (row.hash for row in rows)) != spec.key:
        raise SourceError("source: it changed while it was being read: run again")
    fetcher = Fetcher(rows, context.settings, context.served_at)
    results = _run_img2dataset(fetcher, context.settings, scratch)
    transient = Counter(f.reason for f in fetcher.failures.values() if f.transient)
    if transient.total() > context.settings.max_transient * len(rows):
        return Deferred(spec.key, dict(transient))
    described = [_describe(spec.key, n, row, results[n]) for n, row in enumerate(rows)]
    samples = _samples(described, rows, results, context.settings.encode_format)
    count = write_tar(scratch / "shard.tar", samples)
    write_rows(scratch / "shard.parquet", described)
    outcomes = Counter(str(d["error_message"] or "success") for d in described)
    meta = {"samples": count, "outcomes": dict(sorted(outcomes.items()))}
    files = {suffix: str(scratch / f"shard{suffix}") for suffix in (".tar", ".parquet")}
    return store.commit_shard(STAGE, spec.key, files, meta)


@dataclass(frozen=True)
class _Result:
    """The outcome of one row."""

    status: str  # success | failed_to_download | failed_to_resize
    reason: str | None = None
    file: Path | None = None  # the resized, re-encoded picture
    sha256: str | None = None  # of that file
    sizes: tuple[int, ...] = ()  # width, height, original width, original height, in pixels


class _Collector:
    """img2dataset's sample writer: saves pictures to files, as rows arrive in any order."""

    def __init__(self, fetcher: Fetcher, folder: Path) -> None:
        self.fetcher, self.folder = fetcher, folder
        self.results: dict[int, _Result] = {}
        self.fault: Exception | None = None

    def write(self, picture: bytes | None, key: str, caption: Any, meta: dict[str, Any]) -> None:
        try:
            number = int(key)
            self.results[number] = self._result(number, picture, meta)
        except Exception as error:  # img2dataset would print the error and continue
            self.fault = self.fault or error

    def close(self) -> None:
        if self.fault is None and len(self.results) != len(self.fetcher.rows):
            missing = len(self.fetcher.rows) - len(self.results)
            self.fault = RuntimeError(f"img2dataset lost {missing} rows of a shard")

    def _result(self, number: int, picture: bytes | None, meta: dict[str, Any]) -> _Result:
        status, message = str(meta["status"]), meta["error_message"]
        if picture is not None:
            file = self.folder / f"picture-{number}"
            file.write_bytes(picture)
            names = ("width", "height", "original_width", "original_height")
            sizes = tuple(int(meta[name]) for name in names)
            return _Result(status, None, file, digest_bytes(picture), sizes)
        if (failure := self.fetcher.failures.get(number)) is not None:
            return _Result(status, failure.reason)
        if message in REASONS:
            return _Result(status, REASONS[message])
        if status == "failed_to_download":  # no recorded failure: a bug or a full disk
            raise RuntimeError(f"a row could not be read: {message}")
        return _Result(status, "cannot be resized")


def _run_img2dataset(fetcher: Fetcher, settings: Download, scratch: Path) -> dict[int, _Result]:
    import pyarrow as pa

    collector, listed = _Collector(fetcher, scratch), scratch / "rows.feather"
    with registered_urls(fetcher) as addresses:
        table = pa.table({"url": pa.array(addresses, pa.string())})
        with pa.OSFile(str(listed), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
            writer.write_table(table)
        # `__call__` would swallow exceptions.
        _downloader(settings, collector, scratch, len(addresses)).download_shard((0, str(listed)))
    if collector.fault is not None:
        raise collector.fault
    return collector.results


def _downloader(settings: Download, collector: _Collector, scratch: Path, rows: int) -> Any:
    downloader, resizer = _img2dataset()
    return downloader(
        sample_writer_class=lambda *_: collector,
        resizer=resizer(
            settings.image_size,
            settings.resize_mode,
            settings.only_if_bigger,
            encode_quality=settings.encode_quality,
            encode_format=settings.encode_format,
            min_image_size=settings.min_image_size,
            max_image_area=settings.max_pixels,
        ),
        thread_count=min(settings.threads, rows),
        save_caption=False,
        extract_exif=False,
        output_folder=str(scratch),
        column_list=["url"],
        timeout=settings.timeout,
        number_sample_per_shard=rows,
        oom_shard_count=1,
        compute_hash=None,
        verify_hash_type=None,
        encode_format=settings.encode_format,
        retries=0,  # the fetcher retries, transient failures only
        user_agent_token=settings.user_agent_token,
        disallowed_header_directives=settings.opt_out_headers,
    )


@cache
def _img2dataset() -> tuple[Any, Any]:
    """img2dataset's Downloader and Resizer, imported on demand: the import takes seconds."""
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # no version check over the network
    import img2dataset.resizer
    from img2dataset.downloader import Downloader

    # It redirects the stdout and stderr of the whole process during decoding. Two threads that do
    # so at once lose the original streams, and other threads lose their output.
    img2dataset.resizer.SuppressStdoutStderr = nullcontext
    return Downloader, img2dataset.resizer.Resizer


def _describe(shard: str, number: int, row: Row, result: _Result) -> dict[str, Any]:
    sizes = result.sizes or (None,) * 4
    names = ("width", "height", "original_width", "original_height")
    return {
        "key": f"{shard[:12]}_{number:05d}",
        "url": without_secrets(row.url),
        "caption": row.captions[0],
        "status": result.status,
        "error_message": result.reason,
        **dict(zip(names, sizes, strict=True)),
        "sha256": result.sha256,
    }


def _samples(
    described: Sequence[dict[str, Any]],
    rows: Sequence[Row],
    results: dict[int, _Result],
    extension: str,
) -> Iterator[Sample]:
    for number, meta in enumerate(described):
        file = results[number].file
        if file is not None:
            kept = {name: value for name, value in meta.items() if name != "error_message"}
            if (score := rows[number].aesthetic_score) is not None:
                kept["aesthetic_score"] = score
            yield Sample(meta["key"], file.read_bytes(), extension, rows[number].captions, kept)
