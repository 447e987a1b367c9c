"""Image shards: a WebDataset tar of pictures and captions, with a parquet of all rows."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import fsspec

from artifacts.records import canonical_json, open_checked, parse_json

EXTENSIONS = ("jpg", "png", "webp")
MASK = "mask.png"
CONTROL = "control.png"
#: Columns of a shard's parquet: one entry for every row of the shard, failures included.
#: `attempts` counts the requests of a row without a picture, in all runs. `row_hash` identifies the
#: row of the source. A shard with further columns of the source has them as JSON in a column
#: ADDITIONAL.
COLUMNS = {
    **dict.fromkeys(("key", "url", "caption", "status", "error_message"), "string"),
    **dict.fromkeys(("attempts", "width", "height", "original_width", "original_height"), "int32"),
    **dict.fromkeys(("sha256", "row_hash"), "string"),
}
ADDITIONAL = "additional"


@dataclass(frozen=True)
class Sample:
    """One picture of an image shard."""

    key: str
    image: bytes  # encoded in the format of `extension`
    extension: str  # jpg | png | webp
    captions: tuple[str, ...]  # at least one, which may be empty
    #: url, caption, width, height, original_width, original_height (pixels); sha256 (hex) of the
    #: downloaded bytes, before any resizing; aesthetic_score if the source has scores; further
    #: columns of the source by their names
    meta: dict[str, Any] = field(default_factory=dict)
    mask: bytes | None = None  # of the loss: grey PNG of the picture's size, 255 = trained on
    control: bytes | None = None  # what a ControlNet reads: RGB PNG of the picture's size

    @property
    def source_sha256(self) -> bytes:
        """sha256 of the downloaded bytes: the picture's identity, whatever its size and format.

        Raises:
            ValueError: `meta` has no sha256.
        """
        digest = self.meta.get("sha256")
        if not isinstance(digest, str):
            raise ValueError(f"sample {self.key}: its metadata has no sha256")
        return bytes.fromhex(digest)


def write_tar(path: Path | str, samples: Iterable[Sample]) -> int:
    """Write samples to a tar, deterministically; return their number.

    Args:
        samples: sorted by key.

    Raises:
        ValueError: keys are out of order or contain a dot or a slash.
    """
    count = 0
    last = ""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for sample in samples:
            if sample.key <= last or "." in sample.key or "/" in sample.key:
                raise ValueError(f"sample key {sample.key!r}: must sort after {last!r}, no . or /")
            count += 1
            last = sample.key
            meta = dict(sample.meta)
            if len(sample.captions) > 1:
                meta["captions"] = list(sample.captions)
            add_member(tar, f"{sample.key}.{sample.extension}", sample.image)
            add_member(tar, f"{sample.key}.json", canonical_json(meta))
            add_member(tar, f"{sample.key}.txt", (sample.captions or ("",))[0].encode())
            for name, data in ((MASK, sample.mask), (CONTROL, sample.control)):
                if data is not None:
                    add_member(tar, f"{sample.key}.{name}", data)
    return count


def read_tar(source: Path | str | IO[bytes], sha256: str | None = None) -> Iterator[Sample]:
    """The samples of a tar, one in memory at a time.

    Args:
        source: a local path, an fsspec URL or an open binary stream.
        sha256: of the whole tar at that path; a reader that reaches the end has verified it.

    Raises:
        Damaged: at the end, if the tar has another sha256.
        ValueError: the file is no image shard.
    """
    is_path = isinstance(source, Path | str)
    opened: Any = fsspec.open(str(source), "rb") if is_path else nullcontext(source)
    if sha256 is not None:
        opened = open_checked(str(source), sha256)
    with opened as stream:
        try:
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                yield from _samples(tar)
        except tarfile.TarError as error:
            name = str(source) if is_path else "image shard"
            raise ValueError(f"{name}: not a readable tar: {error}") from None


def write_rows(
    path: Path | str, rows: Iterable[dict[str, Any]], *, additional: bool = False
) -> None:
    """Write the parquet of a shard from dicts with keys of COLUMNS; absent values are null.

    Args:
        additional: whether the rows also have ADDITIONAL.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = COLUMNS | ({ADDITIONAL: "string"} if additional else {})
    schema = pa.schema([(name, getattr(pa, kind)()) for name, kind in columns.items()])
    pq.write_table(pa.Table.from_pylist(list(rows), schema), path, compression="zstd")


def read_rows(source: Path | str | bytes) -> list[dict[str, Any]]:
    """The rows of a shard's parquet, from a local path or from its bytes."""
    import pyarrow.parquet as pq

    opened = BytesIO(source) if isinstance(source, bytes) else str(source)
    # A thread of pyarrow that reads ahead crashed processes at their exit.
    return list(pq.read_table(opened, pre_buffer=False).to_pylist())


def add_member(tar: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    """Add a file to a tar, deterministically: no owner, time stamp 0, permission bits `mode`."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    member.mode = mode
    tar.addfile(member, BytesIO(data))


def _samples(tar: tarfile.TarFile) -> Iterator[Sample]:
    for key, members in groupby(tar, key=lambda member: member.name.partition(".")[0]):
        parts = {}
        for member in members:
            stream = tar.extractfile(member)
            if stream is None:
                raise ValueError(f"{member.name}: an image shard holds plain files only")
            parts[member.name.partition(".")[2]] = stream.read()
        yield _sample(key, parts)


def _sample(key: str, parts: dict[str, bytes]) -> Sample:
    extension = next((name for name in EXTENSIONS if name in parts), None)
    if extension is None:
        raise ValueError(f"sample {key}: no picture ({', '.join(sorted(parts))} only)")
    meta = parse_json(parts.get("json", b"{}"))
    if not isinstance(meta, dict):
        raise ValueError(f"sample {key}: its metadata is no JSON object")
    captions = meta.get("captions") or [parts.get("txt", b"").decode()]
    if not isinstance(captions, list) or not all(isinstance(c, str) for c in captions):
        raise ValueError(f"sample {key}: its captions are no list of strings")
    more = (parts.get(MASK), parts.get(CONTROL))
    return Sample(key, parts[extension], extension, tuple(captions), meta, *more)
