"""Download one shard: rows in, a committed tar and parquet out, or a word on why it was left."""

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
from tasks.download.fetch import Fetcher, offered
from tasks.download.lists import Span
from tasks.download.rows import Row
from tasks.download.sources import SOURCES, Place

STAGE = "download"
VERSION = 2
#: How a download is carried out rather than what comes out: no part of a key.
CARRYING_OUT = {
    "threads",
    "timeout",
    "deadline",
    "retries",
    "backoff",
    "max_failed",
    "max_transient",
}
#: What img2dataset calls some of its refusals, in our words.
WORDS = {
    "Use of image disallowed by X-Robots-Tag directive": "opted out",
    "Image decoding error": "not an image",
    "image too small": "too small",
    "image area too large": "too many pixels",
}


@dataclass(frozen=True)
class ShardSpec:
    """One shard to download: its key, and where its rows are."""

    key: str
    rows: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Work:
    """What every shard of a run has in common; sent to the workers."""

    store: str  # URL
    notes: str  # path in the store where a shard that is left says why
    source: Any  # the recipe's source section
    settings: Download
    place: Place


@dataclass(frozen=True)
class Left:
    """A shard that was not committed, so that the next run takes it up again."""

    key: str
    reasons: dict[str, int]


def shard_settings(settings: Download) -> dict[str, Any]:
    """The settings that change a shard's bytes, given its rows."""
    return settings.model_dump(mode="json", exclude={*CARRYING_OUT, "shard_size"})


def shard_key(settings: Download, row_hashes: Iterable[str]) -> str:
    """Key of the shard with these rows: its input's content and the settings, nothing else."""
    settled = shard_settings(settings)
    parts = {"stage": STAGE, "version": VERSION, "settings": settled, "rows": list(row_hashes)}
    return digest_json(parts)


def download_shard(spec: ShardSpec, work: Work) -> Shard | Left:
    """Reuse the shard if it is there and whole, else download and commit it."""
    store = Store(work.store)
    present = store.shard(STAGE, spec.key)
    if present is not None:
        return present
    record = f"{store.shards_path(STAGE)}/{spec.key}.json"
    if store.fs.exists(record):  # damaged: it must not pass for whole if this attempt fails
        store.fs.rm_file(record)
    with tempfile.TemporaryDirectory(prefix="kiln-") as scratch:
        return _download(spec, work, store, Path(scratch))


def _download(spec: ShardSpec, work: Work, store: Store, scratch: Path) -> Shard | Left:
    rows = list(SOURCES[work.source.kind](work.source).read(spec.spans, scratch))
    if shard_key(work.settings, (row.hash for row in rows)) != spec.key:
        raise SourceError("source: it changed while it was being read: run again")
    fetcher = Fetcher(rows, work.settings, work.place)
    results = _run_img2dataset(fetcher, work.settings, scratch)
    passing = Counter(f.reason for f in fetcher.failures.values() if f.transient)
    if passing.total() > work.settings.max_transient * len(rows):
        return Left(spec.key, dict(passing))
    described = [_describe(spec.key, n, row, results[n]) for n, row in enumerate(rows)]
    samples = _samples(described, rows, results, work.settings.encode_format)
    count = write_tar(scratch / "shard.tar", samples)
    write_rows(scratch / "shard.parquet", described)
    outcomes = Counter(str(d["error_message"] or "success") for d in described)
    meta = {"samples": count, "outcomes": dict(sorted(outcomes.items()))}
    files = {suffix: str(scratch / f"shard{suffix}") for suffix in (".tar", ".parquet")}
    return store.commit_shard(STAGE, spec.key, files, meta)


@dataclass(frozen=True)
class _Result:
    """What became of one row."""

    status: str  # success | failed_to_download | failed_to_resize
    reason: str | None = None
    file: Path | None = None  # the resized, re-encoded picture
    sha256: str | None = None  # of that file
    sizes: tuple[int, ...] = ()  # width, height, original width, original height, in pixels


class _Collector:
    """img2dataset's sample writer: keeps pictures as files until all rows are in, in any order."""

    def __init__(self, fetcher: Fetcher, folder: Path) -> None:
        self.fetcher, self.folder = fetcher, folder
        self.results: dict[int, _Result] = {}
        self.fault: Exception | None = None

    def write(self, picture: bytes | None, key: str, caption: Any, meta: dict[str, Any]) -> None:
        try:
            number = int(key)
            self.results[number] = self._result(number, picture, meta)
        except Exception as error:  # img2dataset would print it and go on
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
        if message in WORDS:
            return _Result(status, WORDS[message])
        if status == "failed_to_download":  # not one of our refusals: a bug, or a full disk
            raise RuntimeError(f"a row could not be read: {message}")
        return _Result(status, "cannot be resized")


def _run_img2dataset(fetcher: Fetcher, settings: Download, scratch: Path) -> dict[int, _Result]:
    import pyarrow as pa

    collector, listed = _Collector(fetcher, scratch), scratch / "rows.feather"
    with offered(fetcher) as addresses:
        table = pa.table({"url": pa.array(addresses, pa.string())})
        with pa.OSFile(str(listed), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
            writer.write_table(table)
        # Not its __call__, which swallows exceptions.
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
        retries=0,  # the fetcher retries, and knows what is worth it
        user_agent_token=settings.user_agent_token,
        disallowed_header_directives=settings.opt_out_headers,
    )


@cache
def _img2dataset() -> tuple[Any, Any]:
    """img2dataset's Downloader and Resizer: seconds to import, so only where they are used."""
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # it asks the network for its version
    import img2dataset.resizer
    from img2dataset.downloader import Downloader

    # It points the process's stdout and stderr elsewhere while it decodes. Two threads that do so
    # leave them pointing nowhere, and meanwhile everybody else's lines are lost.
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
