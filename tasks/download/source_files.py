"""Files of a source: find them, know whether they changed, and convert errors of reading them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple

import fsspec
from fsspec import AbstractFileSystem
from fsspec.core import OpenFile, get_compression, split_protocol, url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import glob_translate

from artifacts import errors, filesystems
from artifacts.errors import web_cause
from artifacts.filesystems import ask_at_once, find_files
from artifacts.records import digest_json, digest_stream
from configs.errors import Refused

#: Names, in fsspec's file info, of values that change when the file changes.
CHANGE_MARKERS = (
    *("mtime", "ino", "created", "oid", "blob_id", "etag", "ETag", "generation", "md5Hash"),
    *("crc32c", "LastModified", "Last-Modified"),
)

#: Folders that macOS, Synology, QNAP and Windows write.
OF_SYSTEMS = r"__MACOSX|@eaDir|@SynoResource|#recycle|@Recycle|\$RECYCLE\.BIN"
#: What hides a file below the folder that a person names: `.x`, `__x__`, and folders of systems.
#: `.` and `..` are no names.
HIDDEN = re.compile(rf"(^|/)(\.(?!\.?(/|$))|(__[^/]*__|(?i:{OF_SYSTEMS}))(/|$))")

#: Names that an error shows.
SHOWN = 20


class ListedFile(NamedTuple):
    """A file of a source."""

    name: str  # local path or fsspec URL
    info: dict[str, Any]  # as fsspec describes it

    @property
    def stamp(self) -> str:
        """A digest (sha256 hex) of name, size and change markers, or of the bytes without any.

        Raises:
            Refused: the file cannot be read.
        """
        marks = [str(self.info[name]) for name in CHANGE_MARKERS if self.info.get(name) is not None]
        if self.info.get("islink"):  # fsspec describes the link itself
            with suppress(OSError):  # it leads nowhere
                target = os.stat(self.name)
                marks += map(str, (target.st_mtime_ns, target.st_ctime_ns, target.st_ino))
        if not marks:
            with reading(self.name), open_file(self.name) as stream:
                marks = [digest_stream(stream)[0]]
        return digest_json([self.name, self.info.get("size"), *marks])


def located(name: str) -> tuple[AbstractFileSystem, str]:
    """Filesystem and path of a listed file. Raises as its client does.

    fsspec would take `::` in a name for a chain of filesystems, which no listing gives.
    """
    if "::" not in name:
        return url_to_fs(name)
    protocol = split_protocol(name)[0] or "file"
    kind = fsspec.get_filesystem_class(protocol)
    return kind(**kind._get_kwargs_from_urls(name)), kind._strip_protocol(name)


def open_file(name: str, compression: str | None = None) -> OpenFile:
    """A listed file, to be opened by `with`; its compression as of `fsspec.open`."""
    fs, path = located(name)
    return OpenFile(fs, path, "rb", compression=get_compression(path, compression))


def list_files(path: str, suffixes: tuple[str, ...]) -> list[ListedFile]:
    """Files at `path`, sorted by name: a file, a folder or a glob, local or at an fsspec URL.

    Hidden files below the folder, or behind the first wildcard, are left out.

    Raises:
        Refused: no file matches, or the location cannot be listed.
        Away: it cannot be listed now.
    """
    with reading(path):
        fs, root = url_to_fs(path)
        fs.invalidate_cache()
        is_local = isinstance(fs, LocalFileSystem)
        if is_pattern(fs, root):
            globbed = _glob(fs, root) if is_local else fs.glob(root, detail=True)
            files = {name: info for name, info in globbed.items() if info["type"] != "directory"}
            chosen = _visible(files, _fixed_part(root))
        elif is_folder(fs, root):
            files = _files(fs, root, math.inf) if is_local else find_files(fs, root)
            visible = _visible(files, root)
            chosen = {name: i for name, i in visible.items() if name.lower().endswith(suffixes)}
        else:
            info = find_info(fs, root)
            chosen = {} if info is None else {root: info}
        if not chosen:
            find_info(fs, root)
            kinds = ", ".join(suffixes) or "visible"
            why = f"{path}: no such file, or no {kinds} files in the folder"
            raise Refused(why, setting="source.path")
        listed = list[ListedFile]()
        for place, info in chosen.items():
            name = place if is_local else str(fs.unstrip_protocol(place))
            try:
                name.encode()
            except UnicodeEncodeError:
                why = f"the name of {name!r} is not UTF-8: rename the file"
                raise Refused(why, setting="source.path") from None
            listed.append(ListedFile(name, info))
        return sorted(listed, key=lambda file: file.name)


def list_range(paths: Sequence[str], suffixes: tuple[str, ...]) -> list[ListedFile]:
    """As `list_files` of each path, but each folder of a bucket is listed once.

    Raises:
        Refused: no file matches a path, or the location cannot be listed.
    """
    with reading(paths[0]):
        fs, _ = url_to_fs(paths[0])
        roots = [url_to_fs(path)[1] for path in paths]
        # A disk answers at once, and a web server lists no folder.
        has_folders = not isinstance(fs, LocalFileSystem) and not paths[0].startswith("http")
        beside = _beside(fs, roots) if has_folders else {}
    listed = list[ListedFile]()
    others = list[str]()
    absent = list[str]()
    for path, root in zip(paths, roots, strict=True):
        info = beside.get(root, {})
        if info.get("type") == "file":
            listed.append(ListedFile(str(fs.unstrip_protocol(root)), info))
        elif info or is_glob(root) or not has_folders:
            others.append(path)
        else:
            absent.append(path)
    if absent:
        more = f", and {len(absent) - SHOWN:,} others" if len(absent) > SHOWN else ""
        raise Refused(f"{', '.join(absent[:SHOWN])}{more}: no such file", setting="source.path")
    each = ask_at_once(fs, lambda path: list_files(path, suffixes), others)
    return listed + [file for files in each for file in files]


def _beside(fs: AbstractFileSystem, paths: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What the folders of these paths have, by name."""
    fs.invalidate_cache()
    entries = dict[str, dict[str, Any]]()
    for folder in {path.rpartition("/")[0]: None for path in paths if not is_glob(path)}:
        with suppress(FileNotFoundError):
            entries |= {entry["name"].rstrip("/"): entry for entry in fs.ls(folder, detail=True)}
    return entries


def is_hidden(name: str) -> bool:
    """Whether a name below a folder is a hidden file's or a system's copy's, or in their folder."""
    return HIDDEN.search(name) is not None


def below(name: str, folder: str) -> str:
    """The name of a listed file below a folder, which may lack the protocol of the name."""
    return name.partition(f"{folder.rstrip('/')}/")[2] or name


def _visible(files: dict[str, dict[str, Any]], folder: str) -> dict[str, dict[str, Any]]:
    return {name: info for name, info in files.items() if not is_hidden(below(name, folder))}


def _files(fs: AbstractFileSystem, folder: str, depth: float) -> dict[str, dict[str, Any]]:
    """Every file below a local folder, by name; a folder behind links is listed once.

    Raises as the filesystem does, where its `find` omits folders.
    """
    entries = dict[str, dict[str, Any]]()
    seen = set[str]()
    folders = [(folder, depth)]
    links = list[tuple[str, float]]()
    while folders or links:
        path, depth = folders.pop() if folders else links.pop(0)
        if (real := os.path.realpath(path)) in seen:
            continue
        seen.add(real)
        for entry in sorted(filesystems.entries(fs, path), key=filesystems.name_of):
            if not filesystems.is_folder(fs, entry):
                entries[entry["name"]] = entry
            elif depth > 1 and not is_hidden(filesystems.name_of(entry)):  # a link may show it
                queue = folders if entry["type"] == "directory" else links
                queue.append((entry["name"], depth - 1))
    return entries


def _glob(fs: AbstractFileSystem, pattern: str) -> dict[str, dict[str, Any]]:
    """Every file that matches. Raises as `_files`."""
    folder = _fixed_part(pattern)
    depth = math.inf if "**" in pattern else pattern.count("/") - folder.count("/")
    matches = re.compile(glob_translate(pattern)).match
    return {name: i for name, i in _files(fs, folder, depth).items() if matches(name)}


def _fixed_part(pattern: str) -> str:
    """The folder in front of the first wildcard."""
    return re.split(r"[*?[]", pattern, maxsplit=1)[0].rpartition("/")[0]


def find_info(fs: AbstractFileSystem, path: str) -> dict[str, Any] | None:
    """What fsspec describes of a file; None if there is none.

    Raises the errors that `isdir` and `exists` hide.
    """
    try:
        return dict(fs.info(path))
    except FileNotFoundError as error:
        if not is_absent(path, error):
            raise
        return None


def is_folder(fs: AbstractFileSystem, path: str) -> bool:
    """Whether a path is a folder; raises as `find_info`.

    Clients of the hub and of GCS also call it none after a request that failed. A web server's
    folder is a file to `find_info`.
    """
    return bool(fs.isdir(path)) or (find_info(fs, path) or {}).get("type") == "directory"


def is_absent(path: str, error: Exception) -> bool:
    """Whether an error means that there is no such file."""
    return isinstance(web_cause(path, error), FileNotFoundError)


def is_pattern(fs: AbstractFileSystem, path: str) -> bool:
    """Whether a path has wildcards and names nothing itself: a folder may be named `photos [1]`."""
    return is_glob(path) and not fs.exists(path)


def is_glob(path: str) -> bool:
    """Whether `path` has wildcards. In an http URL a question mark starts the query."""
    wildcards = "*" if path.startswith(("http://", "https://")) else "*?["
    return any(wildcard in path for wildcard in wildcards)


def reading(path: str) -> AbstractContextManager[None]:
    """Raise what the errors of reading a file of a source mean: Refused or Away."""
    return errors.reading(f"source: {path}", path)
