"""Folders of pictures and of parquet files as sources.

A folder is served over HTTP on loopback while a stage runs. Parquet files have the pictures
embedded.
"""

from __future__ import annotations

import errno
import logging
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import url_to_fs

from artifacts.records import digest_bytes
from configs.errors import Refused
from configs.secrets import without_secrets
from configs.settings.data import DatasetSource, FolderSource
from tasks import sql_condition
from tasks.beam.workers import is_hub_id
from tasks.download import lists, source_files
from tasks.download.rows import shard_ends, text_of, text_of_file
from tasks.download.tars import EXTENSIONS

LOOPBACK = "127.0.0.1"
Served = TypeVar("Served")


@contextmanager
def serve_folder(
    folder: Path, port: int, served_at: Callable[[str, tuple[str, ...]], Served]
) -> Iterator[Served]:
    """Serve `folder` and yield `served_at(base URL, (host:port,))`.

    Raises:
        Refused: the port is in use or needs privileges.
    """
    try:
        server = _Server((LOOPBACK, port), partial(_QuietHandler, directory=str(folder)))
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        why = "is in use" if error.errno == errno.EADDRINUSE else "needs privileges"
        words = f"port {port} {why} on this machine: choose another, or 0 for a free one"
        raise Refused(words, setting="source.port") from None
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        address = f"{LOOPBACK}:{server.server_address[1]}"
        yield served_at(f"http://{address}/", (address,))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Suppress the log line per request."""


PICTURES_AT_ONCE = 32  # in memory, of a parquet file
#: Behind a split's name in that of a file: its number among `of` files, or any number. Without
#: separators, `v1` would read `v12.parquet`, and a name of 30 digits take minutes.
NUMBER = r"(-\d+-of-\d+(-[0-9a-f]+)?|([-_. ]\d+)*)(?i:\.parquet)"


class Dataset(lists.Source):
    """Parquet files with embedded pictures: bytes, or Hugging Face's {bytes, path} structs."""

    def __init__(self, settings: DatasetSource) -> None:
        self.settings = settings

    def check(self) -> None:
        lists.require_columns(self.settings, "parquet", self._files()[0].name)

    def pieces(self) -> Iterator[lists.Piece]:
        for file in self._files():
            yield lists.piece_of(self.settings, [file], partial(self._rows, file.name))

    def pictures(self, places: Iterable[lists.PictureLocation]) -> Iterator[bytes | None]:
        for file, wanted in _ascending(places):
            image = self.settings.image_column
            selected = set(wanted)
            for number, values in parquet_rows(file, [image], wanted[0], wanted[-1] + 1):
                if number in selected:
                    yield self._picture(values[image])

    def _rows(self, file: str) -> Iterator[pa.Table]:
        s = self.settings
        lists.require_columns(s, "parquet", file)  # `check` reads the first file alone

        kept = lists.kept_rows(file, s)

        def rows() -> Iterator[dict[str, Any]]:
            for number, values in parquet_rows(file, list(lists.named_columns(s).values())):
                if kept is None or kept[number]:
                    picture = self._picture(values[s.image_column])
                    place = lists.PictureLocation(file, number)
                    yield lists.embedded_row(picture, place, s, values)

        return lists.hash_rows(rows())

    def _files(self) -> list[source_files.ListedFile]:
        path = self.settings.path
        split = self.settings.split
        if is_hub_id(path):
            revision = f"@{self.settings.revision}" if self.settings.revision else ""
            path = f"hf://datasets/{path}{revision}"
        files = source_files.list_files(path, lists.FORMATS["parquet"].suffixes)
        fs, root = url_to_fs(path)
        if [file.name for file in files] == [path] or source_files.is_pattern(fs, root):
            return files
        chosen = [f for f in files if _is_of_split(source_files.below(f.name, root), split)]
        if not chosen and root.rstrip("/").rpartition("/")[2] == split:
            return files
        if not chosen:
            names = ", ".join(f.name.rpartition("/")[2] for f in files[:5])
            raise Refused(
                f"{path} has no files of split {split!r} ({names}): write the whole "
                "name of a split, or a glob of its files as source.path",
                setting="source.split",
            )
        return chosen

    def _picture(self, image: Any) -> bytes | None:
        picture = image.get("bytes") if isinstance(image, dict) else image
        if not isinstance(picture, bytes | None):
            raise Refused(
                f"{self.settings.image_column} holds "
                f"{type(picture).__name__}, not encoded pictures (bytes, or a struct with bytes)",
                setting="source.image_column",
            )
        return picture


def _ascending(places: Iterable[lists.PictureLocation]) -> Iterator[tuple[str, list[int]]]:
    """(file, ascending numbers of rows): a file is read again for a number that goes back."""
    file = ""
    numbers = list[int]()
    for place in places:
        row = int(place.row or 0)
        if numbers and (place.file != file or row <= numbers[-1]):
            yield file, numbers
            numbers = []
        file = place.file
        numbers.append(row)
    if numbers:
        yield file, numbers


def _is_of_split(name: str, split: str) -> bool:
    """Whether a file belongs to a split, by its name below the dataset's folder.

    As the hub writes them: <split>-00000-of-00001.parquet, or <split>/0000.parquet.
    """
    folder, _, file = name.rpartition("/")
    is_named = re.fullmatch(re.escape(split) + NUMBER, file) is not None
    return is_named or folder.rpartition("/")[2] == split


def parquet_rows(
    file: str, columns: Sequence[str], start: int = 0, stop: int | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, values) of the rows in [start, stop); few are in memory at a time."""
    with source_files.reading(file), source_files.open_file(file) as stream:
        table = pq.ParquetFile(stream, buffer_size=2**20, pre_buffer=False)
        counts = [table.metadata.row_group(n).num_rows for n in range(table.num_row_groups)]
        ends = np.cumsum(counts, dtype=int)
        stop = int(sum(counts)) if stop is None else stop
        groups = [n for n, end in enumerate(ends) if end > start and end - counts[n] < stop]
        number = int(ends[groups[0]]) - counts[groups[0]] if groups else 0
        for batch in table.iter_batches(PICTURES_AT_ONCE, row_groups=groups, columns=[*columns]):
            for values in batch.to_pylist() if number < stop else []:
                if start <= number < stop:
                    yield number, values
                number += 1


PICTURES = tuple(f".{extension}" for extension in EXTENSIONS)
PIECE = 1000  # files: the average of a piece
CAPTION = ".txt"
#: Extensions of what may be captions of pictures.
COMPANIONS = (CAPTION, ".caption", ".csv", ".tsv", ".json", ".jsonl", ".parquet", ".xlsx")
#: Names of tables of pictures, as in `datasets`, -> their format. If several are beside each other,
#: the first is read.
METADATA = {"metadata.jsonl": "jsonl", "metadata.csv": "csv", "metadata.parquet": "parquet"}
#: Unread files that a warning names.
NAMED = 5
log = logging.getLogger("kiln")


class FolderFiles(NamedTuple):
    """The files of a folder of pictures."""

    tables: dict[str, list[source_files.ListedFile]]  # metadata -> all files of its folder
    captioned: list[source_files.ListedFile]  # the others, whose captions are beside them

    @property
    def unread(self) -> list[str]:
        """Names of files that may be captions or metadata and are not read."""
        files = [file.name for part in (*self.tables.values(), self.captioned) for file in part]
        pictures = {name for name in files if _has(name, *PICTURES)}
        companions = pictures.union(map(_stem, pictures))
        texts = _captions([file.name for file in self.captioned]).values()
        read = pictures | self.tables.keys() | set(texts)
        others = [name for name in files if name not in read]
        return [n for n in others if _has(n, *COMPANIONS) or _stem(n) in companions]


class Folder(lists.Source):
    """A folder of pictures: one row per line of a table of METADATA, or else per picture.

    A table describes its folder and all below it. Elsewhere the caption of `name.jpg` is the text
    of `name.txt`, in any case.
    """

    def __init__(self, settings: FolderSource) -> None:
        self.settings = settings
        self.columns = {"source.path": "file_name", **lists.named_columns(settings)}

    def check(self) -> None:
        files = self._files()
        folder = self.settings.path
        for table in files.tables:
            columns = lists.FORMATS[METADATA[_own_name(table)]].columns(table)
            sql_condition.require_columns(self.columns, columns, table)
        needs_table = self.settings.aesthetic_column or self.settings.additional_columns
        if needs_table and not files.tables:
            has_scores = self.settings.aesthetic_column is not None
            setting = "aesthetic_column" if has_scores else "additional_columns"
            raise Refused(f"source.{setting}: {folder} has no {', '.join(METADATA)}")
        if not files.tables and not any(_has(f.name, *PICTURES) for f in files.captioned):
            why = f"{folder} has no pictures ({', '.join(PICTURES)})"
            raise Refused(why, setting="source.path")
        if unread := files.unread:
            names = ", ".join(map(without_secrets, unread[:NAMED]))
            log.warning(
                "source: %s: %s files beside pictures are not read (%s): captions are read from "
                "%s, or without them from one <name>%s for each picture",
                *(without_secrets(folder), f"{len(unread):,}", names),
                *(", ".join(METADATA), CAPTION),
            )

    def pieces(self) -> Iterator[lists.Piece]:
        files = self._files()
        for table, beside in files.tables.items():
            yield lists.piece_of(self.settings, beside, partial(self._listed, table))
        # A picture and its text have one stem, in any case; a piece has all files of its stems.
        stems = [list(p) for _, p in groupby(files.captioned, lambda file: _folded(file.name))]
        prefixes = [int(digest_bytes(_folded(part[0].name).encode())[:8], 16) for part in stems]
        ends = [*shard_ends(np.array(prefixes, np.uint32), PIECE), len(stems)]
        for start, end in zip([0, *ends], ends, strict=False):
            part = [file for files_of_stem in stems[start:end] for file in files_of_stem]
            if captions := _captions([file.name for file in part]):
                yield lists.piece_of(self.settings, part, partial(self._captioned, captions))

    def pictures(self, places: Iterable[lists.PictureLocation]) -> Iterator[bytes | None]:
        return (_bytes_at(place.file) for place in places)

    def _files(self) -> FolderFiles:
        with source_files.reading(self.settings.path):
            fs, root = url_to_fs(self.settings.path)
            if not source_files.is_folder(fs, root):
                raise Refused(f"{self.settings.path}: no such folder", setting="source.path")
        files = sorted(
            source_files.list_files(self.settings.path, ("",)), key=lambda file: _folded(file.name)
        )
        folder_files = FolderFiles(_tables(file.name for file in files), [])
        folders = {_folder(table): table for table in folder_files.tables}
        for file in files:
            table = next((folders[above] for above in _above(file.name) if above in folders), None)
            (folder_files.captioned if table is None else folder_files.tables[table]).append(file)
        return folder_files

    def _captioned(self, captions: Mapping[str, str]) -> Iterator[pa.Table]:
        def rows() -> Iterator[dict[str, Any]]:
            for file, text in captions.items():
                caption = text_of_file(_bytes_at(text) or b"").strip()
                place = lists.PictureLocation(file, None)
                yield lists.embedded_row(_bytes_at(file), place, self.settings, None, caption)

        return lists.hash_rows(rows())

    def _listed(self, metadata: str) -> Iterator[pa.Table]:
        def rows() -> Iterator[dict[str, Any]]:
            hidden = 0
            for values in _rows(metadata, [*self.columns.values()]):
                name = text_of(values.get("file_name"))
                if source_files.is_hidden(name):
                    hidden += 1
                    continue
                if name.startswith("/") or ".." in name.split("/") or "://" in name:
                    raise Refused(f"source: {metadata}: file_name {name!r} leads out of the folder")
                file = f"{_folder(metadata)}/{name}"
                picture = _bytes_at(file) if name else None
                place = lists.PictureLocation(file, None)
                yield lists.embedded_row(picture, place, self.settings, values)
            if hidden:
                words = "source: %s: %d lines name hidden files, which are no rows"
                log.warning(words, without_secrets(metadata), hidden)

        with source_files.reading(metadata):
            yield from lists.hash_rows(rows())


def _tables(names: Iterable[str]) -> dict[str, list[source_files.ListedFile]]:
    """The tables among the files, without those in a folder that a table above describes."""
    order = [*METADATA]
    tables = [name for name in names if _own_name(name) in METADATA]
    tables.sort(key=lambda name: (name.count("/"), _folder(name), order.index(_own_name(name))))
    folders = dict[str, str]()
    for name in tables:
        if not any(above in folders for above in _above(name)):
            folders[_folder(name)] = name
    return {name: [] for name in folders.values()}


def _captions(names: Sequence[str]) -> dict[str, str]:
    """Pictures -> the text of their stem, or the only text whose stem differs by case alone."""
    pictures = [name for name in names if _has(name, *PICTURES)]
    texts = {_stem(name): name for name in names if _has(name, CAPTION)}
    alike = defaultdict[str, list[str]](list)
    for stem in texts.keys() - set(map(_stem, pictures)):
        alike[_folded(texts[stem])].append(texts[stem])
    captions = dict[str, str]()
    for name in pictures:
        others = alike[_folded(name)]
        # A web server may have captions that it does not list.
        other = others[0] if len(others) == 1 else _stem(name) + CAPTION
        captions[name] = texts.get(_stem(name), other)
    return captions


def _rows(table: str, columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    kind = METADATA[_own_name(table)]
    if kind == "parquet":
        return (values for _, values in parquet_rows(table, columns))
    return lists.csv_rows(table, ",") if kind == "csv" else lists.json_rows(table)


def _above(name: str) -> Iterator[str]:
    """The folders that a file is in."""
    while name := _folder(name):
        yield name


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _own_name(name: str) -> str:
    return name.rpartition("/")[2].lower()


def _has(name: str, *suffixes: str) -> bool:
    return name.lower().endswith(suffixes)


def _stem(name: str) -> str:
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.rpartition(".")[0]


def _folded(name: str) -> str:
    """The stem without regard to case; a folder's name is whole."""
    folder, slash, stem = _stem(name).rpartition("/")
    return folder + slash + stem.casefold()


def _bytes_at(file: str) -> bytes | None:
    with source_files.reading(file):
        try:
            with source_files.open_file(file) as stream:
                return bytes(stream.read())
        except IsADirectoryError:
            return None
        except FileNotFoundError as error:
            if not source_files.is_absent(file, error):
                raise
            return None
