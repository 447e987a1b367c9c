"""WebDataset tars of others as a source.

A tar of unknown origin is read without trusting it. Python's tarfile takes a damaged header for the
end of the archive, so that the rest is missing without an error. It also reads extended headers of
any size into memory.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby, islice
from typing import IO, Any, NamedTuple

import pyarrow as pa
from braceexpand import braceexpand

from configs.errors import Refused
from configs.secrets import without_secrets
from configs.settings.data import TarsSource
from tasks import sql_condition
from tasks.download import lists, source_files
from tasks.download.rows import integer, text_of_file

BLOCK = 512  # bytes
END = bytes(BLOCK)
#: Bytes of an extended header: it has a name, or a few numbers.
MAX_EXTENDED = 2**16
#: Extended headers of a member, files of a sample, samples of a tar.
MOST_EXTENDED = 16
MOST_FILES = 100
MOST_SAMPLES = 2_000_000
PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
DAMAGED = "it is no tar, or has a damaged header"
CUT_OFF = "the tar is cut off"
#: Beginnings of compressed files: gzip, bzip2, xz, zstd.
COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")


class Member(NamedTuple):
    """A member of a tar; its name is a label, and leads to no path."""

    name: str
    offset: int  # of its first header, in bytes
    start: int  # of its content
    size: int  # bytes
    is_plain: bool  # no folder, link, device or sparse file


class File(NamedTuple):
    """A file of a sample."""

    offset: int  # of its first header, in bytes
    content: bytes | None  # None: not asked for, too large, no plain file, or there twice


class Sample(NamedTuple):
    """The files of one name."""

    key: str  # the name up to the first dot, with its folders
    files: dict[str, File]  # by extension, in small letters


def samples(stream: IO[bytes], limit: Callable[[str], int]) -> Iterator[Sample]:
    """The samples of a tar, whose files are read once, in order.

    Args:
        limit: the most bytes to read of a file, by its extension; 0: it is not read.

    Raises:
        ValueError: the tar is damaged, cut off or compressed, the files of a sample are apart, or
            all are hidden.
    """
    sample = Sample("", {})
    seen: set[int] = set()  # hashes of keys
    hidden = ""
    for member in members(stream):
        if source_files.is_hidden(member.name):  # WebDataset, too, skips `__x__`
            hidden = hidden or member.name
            continue
        # As in WebDataset, the first dot of the last part is between key and extension.
        folder, slash, file = member.name.rpartition("/")
        stem, _, extension = file.partition(".")
        if not stem or not extension:
            continue
        key = f"{folder}{slash}{stem}"
        extension = extension.lower()
        if key != sample.key:
            if sample.files:
                yield sample
            sample = Sample(key, {})
            if hash(key) in seen:
                # To pair files by position would give pictures the captions of others.
                raise ValueError(
                    f"the files of sample {key[:200]!r} are not beside each other: write the tar "
                    "sorted by name"
                )
            seen.add(hash(key))
        if len(seen) > MOST_SAMPLES:
            raise ValueError(f"it has more than {MOST_SAMPLES:,} samples: write several tars")
        if len(sample.files) == MOST_FILES:
            raise ValueError(
                f"sample {key[:200]!r} has more than {MOST_FILES} files: name the files of another "
                "picture differently before the first dot"
            )
        is_read = member.is_plain and member.size <= limit(extension)
        is_read &= extension not in sample.files
        content = _read(stream, member.start, member.size) if is_read else None
        sample.files[extension] = File(member.offset, content)
    if sample.files:
        yield sample
    if hidden and not seen:
        raise ValueError(
            f"its samples are all hidden, the first is {hidden[:200]!r}: write the tar from inside "
            "their folder"
        )


def content_at(stream: IO[bytes], offset: int, limit: int) -> bytes | None:
    """The content of the plain file whose first header is at `offset`; None if there is none.

    Args:
        limit: the most bytes to read.
    """
    try:
        member, _ = _member(stream, offset, stream.seek(0, os.SEEK_END))
    except ValueError:
        return None
    if member is None or not member.is_plain or member.size > limit:
        return None
    return _read(stream, member.start, member.size)


def members(stream: IO[bytes]) -> Iterator[Member]:
    """The members of a tar, folders excluded; contents are not read. Raises ValueError."""
    end = stream.seek(0, os.SEEK_END)
    offset = 0
    last = "its start"
    while True:
        try:
            member, offset = _member(stream, offset, end)
        except ValueError as error:
            # A member may be named like the beginning of a compressed file.
            if offset == 0 and _read(stream, 0, min(6, end)).startswith(COMPRESSED):
                raise ValueError(
                    "it is compressed: unpack it, since pictures are read by their position"
                ) from None
            raise ValueError(f"{error}, behind {last}") from None
        if member is None:
            break
        last = repr(member.name[:200])
        if not member.name.endswith("/"):
            yield member
    stream.seek(offset)
    while rest := stream.read(2**20):
        if rest.strip(b"\0"):
            raise ValueError("it has data behind its end: write one tar, not several in a row")


def _member(stream: IO[bytes], offset: int, end: int) -> tuple[Member | None, int]:
    """The member whose first header is at `offset`, and where the next member begins.

    It is None at the end of the archive. Raises ValueError.
    """
    first = offset
    extended = dict[str, str]()
    for _ in range(MOST_EXTENDED):
        if offset + BLOCK > end:
            raise ValueError(CUT_OFF)
        block = _read(stream, offset, BLOCK)
        if block == END and offset == first:
            return None, offset + BLOCK
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            raise ValueError(DAMAGED) from None
        start = offset + BLOCK
        if header.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME):
            if not 0 <= header.size <= MAX_EXTENDED:
                raise ValueError("a header is too large")
            extended |= _extended(header.type, _read(stream, start, header.size))
        elif header.type not in (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK):
            is_extended = block[482] if header.type == tarfile.GNUTYPE_SPARSE else 0
            while is_extended:
                is_extended = _read(stream, start, BLOCK)[504]
                start += BLOCK
            return _described(header, first, start, extended, end)
        offset = _behind(start, header.size, end)
    raise ValueError("a member has too many headers")


def _described(
    header: tarfile.TarInfo, first: int, start: int, extended: dict[str, str], end: int
) -> tuple[Member, int]:
    has_content = header.type in PLAIN or header.type not in tarfile.SUPPORTED_TYPES
    has_content |= header.type == tarfile.GNUTYPE_SPARSE
    size = _number(extended.get("size", str(header.size))) if has_content else 0
    is_plain = header.type in PLAIN and not any(n.startswith("GNU.sparse.") for n in extended)
    name = extended.get("path", header.name)
    if header.isdir():
        name = f"{name.rstrip('/')}/"
    return Member(name, first, start, size, is_plain), _behind(start, size, end)


def _behind(start: int, size: int, end: int) -> int:
    """Where the header behind a content of `size` bytes begins."""
    following = start + -(-size // BLOCK) * BLOCK
    if size < 0:
        raise ValueError(DAMAGED)
    if following > end:
        raise ValueError(CUT_OFF)
    return following


def _extended(kind: bytes, data: bytes) -> dict[str, str]:
    """The values of an extended header: GNU's long names, or pax records (POSIX.1-2001)."""
    if kind == tarfile.GNUTYPE_LONGNAME:
        return {"path": data.partition(b"\0")[0].decode(errors="surrogateescape")}
    data = data.rstrip(b"\0")
    at = 0
    records = {}
    while at < len(data):
        length, space, _ = data[at : at + 20].partition(b" ")  # a record's, in decimal digits
        end = at + _number(length.decode(errors="replace"))
        name, equals, value = data[at + len(length) + 1 : end].partition(b"=")
        if not space or not equals or not value.endswith(b"\n") or end > len(data):
            raise ValueError(DAMAGED)
        records[name.decode(errors="replace")] = value[:-1].decode(errors="surrogateescape")
        at = end
    return records


def _number(digits: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", digits):
        raise ValueError(DAMAGED)
    return int(digits)


def _read(stream: IO[bytes], start: int, size: int) -> bytes:
    stream.seek(start)
    data = stream.read(size)
    if len(data) != size:
        raise ValueError(CUT_OFF)
    return data


TAR = (".tar",)
EXTENSIONS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")
#: Bytes of a picture, and of a caption or a json, that are read: a tar may claim any size.
MAX_PICTURE = 2**27
MAX_TEXT = 2**20
#: Tars of a range, and samples in which a check looks for the columns.
MOST_TARS = 1_000_000
CHECKED = 100
#: A range of numbers, or what nests and separates ranges.
BRACES = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?\}|[{},]")
log = logging.getLogger("kiln")


class Tars(lists.Source):
    """WebDataset tars: one row per sample, whose picture is found by its position in the tar."""

    def __init__(self, settings: TarsSource) -> None:
        self.settings = settings
        extension = (settings.image_extension or "").lower()
        self.pictures_are = (extension,) if extension else EXTENSIONS
        self.masks_are = settings.mask_extension.lower() if settings.mask == "files" else ""
        self.references_are = [name.lower() for name in settings.reference_extensions]
        has_control = settings.control == "files"
        self.controls_are = settings.control_extension.lower() if has_control else ""
        self.has_text = settings.caption_column == "txt"
        is_key = settings.caption_column is not None and not self.has_text
        self.needs_json = bool(is_key or settings.aesthetic_column or settings.additional_columns)

    def check(self) -> None:
        file = self._files()[0].name
        with source_files.reading(file), source_files.open_file(file) as stream:
            first_samples = list(islice(samples(stream, self._limit_of_text), CHECKED))
        if not first_samples:
            return
        extensions = {extension: None for sample in first_samples for extension in sample.files}
        if extensions.keys().isdisjoint(self.pictures_are):
            raise Refused(
                f"{file} has no pictures ({', '.join(self.pictures_are)}), "
                f"but {' '.join(', '.join(islice(extensions, 20)).split())}",
                setting="source.image_extension",
            )
        if not any(len(self._pictures(sample)) == 1 for sample in first_samples):
            kinds = ", ".join(kind for kind in extensions if kind in self.pictures_are)
            why = f"{file} has no sample with one picture: set it to one of {kinds}"
            raise Refused(why, setting="source.image_extension")
        for setting, beside in (("mask", self.masks_are), ("control", self.controls_are)):
            if beside and beside not in extensions:
                why = f"{file} has no .{beside} beside the first pictures"
                raise Refused(why, setting=f"source.{setting}_extension")
        for number, extension in enumerate(self.references_are):
            setting = f"source.reference_extensions.{number}"
            sql_condition.require_columns({setting: extension}, [*extensions], file)
        keys = {key: None for sample in first_samples for key in _json(sample) or ()}
        # `txt` is the caption's file for one setting, and a key of the json for all others.
        texts = ["txt"] * ("txt" in extensions) + [key for key in keys if key != "txt"]
        for setting, column in lists.named_columns(self.settings).items():
            present = texts if setting == "source.caption_column" else list(keys)
            sql_condition.require_columns({setting: column}, present, file)

    def pieces(self) -> Iterator[lists.Piece]:
        for file in self._files():
            yield lists.piece_of(self.settings, [file], partial(self._rows, file.name))

    def pictures(self, places: Iterable[lists.PictureLocation]) -> Iterator[bytes | None]:
        for file, group in groupby(places, lambda place: place.file):
            with source_files.reading(file), source_files.open_file(file) as stream:
                for place in group:
                    yield content_at(stream, int(place.row or 0), MAX_PICTURE)

    def _paths(self) -> list[str]:
        """The path, or those of its range."""
        path = self.settings.path
        if "{" not in path:
            return [path]
        try:
            # braceexpand holds some ranges in memory as a whole.
            if _count(path) <= MOST_TARS:
                return list(braceexpand(path, escape=False))  # a backslash is part of a name
        except ValueError as error:
            raise Refused(f"{path}: {error}", setting="source.path") from None
        raise Refused(f"{path}: it names more than {MOST_TARS:,} files", setting="source.path")

    def _files(self) -> list[source_files.ListedFile]:
        """All tars, sorted by name, each once."""
        paths = self._paths()
        if len(paths) == 1:
            return source_files.list_files(paths[0], TAR)
        files = {file.name: file for file in source_files.list_range(paths, TAR)}
        return [files[name] for name in sorted(files)]

    def _pictures(self, sample: Sample) -> list[File]:
        names = [name for name in self.pictures_are if name not in self.references_are]
        return [sample.files[name] for name in names if name in sample.files]

    def _rows(self, file: str) -> Iterator[pa.Table]:
        def rows() -> Iterator[dict[str, Any]]:
            missing = 0
            first = ""
            for sample in samples(stream, self._limit):
                row = self._row(file, sample)
                if not row["url"]:
                    missing = missing + 1
                    first = first or sample.key
                yield row
            if missing:
                words = "source: %s: %d samples have no usable picture, the first is %r"
                log.warning(words, without_secrets(file), missing, first[:200])

        with source_files.reading(file), source_files.open_file(file) as stream:
            yield from lists.hash_rows(rows())

    def _row(self, file: str, sample: Sample) -> dict[str, Any]:
        """A row, without a picture if any file of the sample that it needs is unusable."""
        files = sample.files
        values = _json(sample) if self.needs_json else {}
        text = files["txt"].content if self.has_text and "txt" in files else b""
        pictures = self._pictures(sample)
        picture = pictures[0] if len(pictures) == 1 else None
        is_usable = picture is not None and values is not None and text is not None
        beside = dict[str, tuple[bytes, lists.PictureLocation]]()
        for name, extension in (("mask", self.masks_are), ("control", self.controls_are)):
            if extension in files:
                offset, content = files[extension]
                is_usable = is_usable and content is not None
                beside[name] = (content or b"", lists.PictureLocation(file, offset))
        references = [files[name] for name in self.references_are if name in files]
        is_usable = is_usable and all(file.content is not None for file in references)
        return lists.embedded_row(
            picture.content if picture is not None and is_usable else None,
            lists.PictureLocation(file, picture.offset if picture is not None else None),
            self.settings,
            values or {},
            text_of_file(text or b"").strip() if self.has_text else None,
            beside,
            [(r.content or b"", lists.PictureLocation(file, r.offset)) for r in references],
        )

    def _limit(self, extension: str) -> int:
        beside = (self.masks_are, self.controls_are, *self.references_are)
        is_image = extension in (*self.pictures_are, *beside)
        return MAX_PICTURE if is_image else self._limit_of_text(extension)

    def _limit_of_text(self, extension: str) -> int:
        is_read = extension == "json" or (extension == "txt" and self.has_text)
        return MAX_TEXT if is_read else 0


def _count(path: str) -> int:
    """How many paths braces of numbers and lists expand to. Raises ValueError."""
    levels = [[0, 1]]  # for each open brace: paths before its last comma, and behind it
    for token in BRACES.finditer(path):
        first, last, step = token.groups()
        if first is not None:
            levels[-1][1] *= abs(int(last) - int(first)) // (int(step or 1) or 1) + 1
        elif token[0] == "{":
            levels.append([0, 1])
        elif len(levels) > 1 and token[0] == ",":
            levels[-1] = [sum(levels[-1]), 1]
        elif len(levels) > 1:
            alternatives = sum(levels.pop())
            levels[-1][1] *= alternatives
    return levels[0][1]


def _json(sample: Sample) -> dict[str, Any] | None:
    """The values of a sample's json; None if it is malformed."""
    if "json" not in sample.files:
        return {}
    try:
        values = json.loads(sample.files["json"].content or b"", parse_int=integer)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None
