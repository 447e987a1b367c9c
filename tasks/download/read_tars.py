"""Read the samples of a tar of unknown origin, without trusting it.

Python's tarfile takes a damaged header for the end of the archive, so that the rest is missing
without an error. It also reads extended headers of any size into memory.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Callable, Iterator
from typing import IO, NamedTuple

from tasks.download.list_files import is_hidden

BLOCK = 512  # bytes
END = bytes(BLOCK)
#: Bytes of an extended header: it has a name, or a few numbers.
MAX_EXTENDED = 2**16
#: Extended headers of a member, files of a sample, samples of a tar.
MOST_EXTENDED, MOST_FILES, MOST_SAMPLES = 16, 100, 2_000_000
PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
DAMAGED, CUT_OFF = "it is no tar, or has a damaged header", "the tar is cut off"
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
        ValueError: the tar is damaged, cut off or compressed, or the files of a sample are apart.
    """
    sample = Sample("", {})
    seen: set[int] = set()  # hashes of keys
    for member in members(stream):
        key, extension = _split(member.name)
        if not extension:
            continue
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
    end, offset, last = stream.seek(0, os.SEEK_END), 0, "its start"
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
    """The member whose first header is at `offset`, and where the next one begins.

    It is None at the end of the archive. Raises ValueError.
    """
    first, extended = offset, dict[str, str]()
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
            if header.type == tarfile.GNUTYPE_SPARSE:
                start = _behind_sparse_headers(stream, start, block[482])
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


def _behind_sparse_headers(stream: IO[bytes], start: int, is_extended: int) -> int:
    while is_extended:
        start, is_extended = start + BLOCK, _read(stream, start, BLOCK)[504]
    return start


def _extended(kind: bytes, data: bytes) -> dict[str, str]:
    """The values of an extended header: of GNU's long names, or of pax records (POSIX.1-2001)."""
    if kind == tarfile.GNUTYPE_LONGNAME:
        return {"path": data.partition(b"\0")[0].decode(errors="surrogateescape")}
    data, at, found = data.rstrip(b"\0"), 0, {}
    while at < len(data):
        length, space, _ = data[at : at + 20].partition(b" ")  # a record's, in decimal digits
        end = at + _number(length.decode(errors="replace"))
        name, equals, value = data[at + len(length) + 1 : end].partition(b"=")
        if not space or not equals or not value.endswith(b"\n") or end > len(data):
            raise ValueError(DAMAGED)
        found[name.decode(errors="replace")] = value[:-1].decode(errors="surrogateescape")
        at = end
    return found


def _number(digits: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", digits):
        raise ValueError(DAMAGED)
    return int(digits)


def _split(name: str) -> tuple[str, str]:
    """Key and extension as WebDataset has them: the first dot of the last part is between them."""
    folder, slash, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    if not stem or is_hidden(name):  # WebDataset, too, skips `__x__`
        return "", ""
    return f"{folder}{slash}{stem}", extension.lower()


def _read(stream: IO[bytes], start: int, size: int) -> bytes:
    stream.seek(start)
    data = stream.read(size)
    if len(data) != size:
        raise ValueError(CUT_OFF)
    return data
