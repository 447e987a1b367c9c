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
#: References of a row at most: the k-th one of row r is at place r * MOST_REFERENCES + k.
MOST_REFERENCES = 1000
#: Behind a split's name in that of a file: its number among `of` files, or any number. Without
#: separators, `v1` would read `v12.parquet`, and a name of 30 digits take minutes.
NUMBER = r"(-\d+-of-\d+(-[0-9a-f]+)?|([-_. ]\d+)*)(?i:\.parquet)"


class Dataset(lists.Source):
    """Parquet files with embedded pictures: bytes, or Hugging Face's {bytes, path} structs."""

    def __init__(self, settings: DatasetSource) -> None:
        self.settings = settings

    def check(self) -> None:
        lists.require_columns(self.settings, "parquet", self.files()[0].name)

    def pieces(self) -> Iterator[lists.Piece]:
        for file in self.files():
            yield lists.piece_of(self.settings, [file], partial(self._rows, file.name))

    def pictures(self, places: Iterable[lists.PictureLocation]) -> Iterator[bytes | None]:
        return self._images(places, "image_column")

    def masks(self, places: Iterable[lists.PictureLocation]) -> Iterator[bytes | None]:
        return self._images(places, "mask_column")

    def controls(self, places: Iterable[lists.PictureLocation]) -> Iterator[bytes | None]:
        return self._images(places, "control_column")

    def references(self, places: Iterable[lists.PictureLocation]) -> Iterator[bytes | None]:
        columns = self.settings.reference_columns
        for file, numbers in _ascending(places):
            rows = {
                row: [*of_row] for row, of_row in groupby(numbers, lambda n: n // MOST_REFERENCES)
            }
            for row, values in parquet_rows(file, columns, min(rows), max(rows) + 1):
                pictures = [*self._references_in(values)] if row in rows else []
                for number in rows.get(row, ()):
                    place = number % MOST_REFERENCES
                    yield pictures[place] if place < len(pictures) else None

    def _references_in(self, values: Mapping[str, Any]) -> Iterator[bytes]:
        """The references of a row's columns, which may have lists of pictures."""
        for number, column in enumerate(self.settings.reference_columns):
            setting = f"reference_columns.{number}"
            several = values[column] if isinstance(values[column], list) else [values[column]]
            for value in several:
                picture = _encoded_image({column: value}, column, setting)
                if picture is not None:
                    yield picture

    def _images(
        self, places: Iterable[lists.PictureLocation], setting: str
    ) -> Iterator[bytes | None]:
        column = getattr(self.settings, setting)
        for file, wanted in _ascending(places):
            selected = set(wanted)
            for number, values in parquet_rows(file, [column], wanted[0], wanted[-1] + 1):
                if number in selected:
                    yield _encoded_image(values, column, setting)

    def _rows(self, file: str) -> Iterator[pa.Table]:
        s = self.settings
        lists.require_columns(s, "parquet", file)  # `check` reads the first file alone

        kept = lists.kept_rows(file, s)

        def rows() -> Iterator[dict[str, Any]]:
            for number, values in parquet_rows(file, list(lists.named_columns(s).values())):
                if kept is None or kept[number]:
                    place = lists.PictureLocation(file, number)
                    picture = _encoded_image(values, s.image_column, "image_column")
                    beside = {
                        name: (image, place)
                        for name, image in self._beside(values).items()
                        if image is not None
                    }
                    first = number * MOST_REFERENCES
                    references = [
                        (reference, lists.PictureLocation(file, first + n))
                        for n, reference in enumerate(self._references_in(values))
                    ]
                    yield lists.embedded_row(
                        picture, place, s, values, beside=beside, references=references
                    )

        return lists.hash_rows(rows())

    def _beside(self, values: Mapping[str, Any]) -> dict[str, bytes | None]:
        """`mask` and `control` of a row, those that have a column."""
        s = self.settings
        columns = {"mask": s.mask_column, "control": s.control_column}
        return {
            name: _encoded_image(values, column, f"{name}_column")
            for name, column in columns.items()
            if getattr(s, name) == "column"
        }

    def files(self) -> list[source_files.ListedFile]:
        """Its parquet files, of its split. Raises Refused if there are none."""
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


def _encoded_image(values: Mapping[str, Any], column: str, setting: str) -> bytes | None:
    image = values[column]
    encoded = image.get("bytes") if isinstance(image, dict) else image
    if not isinstance(encoded, bytes | None):
        raise Refused(
            f"{column} holds {type(encoded).__name__}, not encoded pictures (bytes, or a struct "
            "with bytes)",
            setting=f"source.{setting}",
        )
    return encoded


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
#: Ends of the stems of pictures beside pictures. OneTrainer's masks end in -masklabel.
BESIDE = {"mask": (".mask", "-masklabel"), "control": (".control",)}
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
    #: `mask`, `control` -> picture -> that beside it.
    beside: dict[str, dict[str, source_files.ListedFile]]

    def of(self, picture: str) -> dict[str, source_files.ListedFile]:
        """`mask`, `control` -> that of a picture, those that there are."""
        return {name: files[picture] for name, files in self.beside.items() if picture in files}

    references: dict[str, list[source_files.ListedFile]]  # picture -> its references, in order

    def of_pictures(self, names: Iterable[str]) -> list[source_files.ListedFile]:
        """The masks, control pictures and references of pictures."""
        files = list[source_files.ListedFile]()
        for name in names:
            files += self.of(name).values()
            files += self.references.get(name, ())
        return files

    @property
    def texts(self) -> dict[str, str | None]:
        """Pictures that no table describes -> the file of their caption; None without one."""
        names = [file.name for file in self.captioned]
        listed = set(names)
        return {p: t if t in listed else None for p, t in _captions(names).items()}

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
        files = self.files()
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
        for setting, beside in files.beside.items():
            own = getattr(self.settings, f"{setting}_folder")
            names = f"NAME.{setting}.png" if own is None else "the name of a picture"
            if not beside:
                why = f"{own or folder} has no file with {names}"
                raise Refused(why, setting=f"source.{setting}")
        if self.settings.references == "files" and not files.references:
            where = ", ".join(self.settings.reference_folders) or folder
            is_beside = not self.settings.reference_folders
            names = "NAME.ref1.png" if is_beside else "the name of a picture"
            raise Refused(f"{where} has no file with {names}", setting="source.references")
        if unread := files.unread:
            names = ", ".join(map(without_secrets, unread[:NAMED]))
            log.warning(
                "source: %s: %s files beside pictures are not read (%s): captions are read from "
                "%s, or without them from one <name>%s for each picture",
                *(without_secrets(folder), f"{len(unread):,}", names),
                *(", ".join(METADATA), CAPTION),
            )

    def pieces(self) -> Iterator[lists.Piece]:
        files = self.files()
        for table, beside in files.tables.items():
            more = files.of_pictures(file.name for file in beside)
            read = partial(self._listed, table, files)
            yield lists.piece_of(self.settings, [*beside, *more], read)
        # A picture and its text have one stem, in any case; a piece has all files of its stems.
        stems = [list(p) for _, p in groupby(files.captioned, lambda file: _folded(file.name))]
        prefixes = [int(digest_bytes(_folded(part[0].name).encode())[:8], 16) for part in stems]
        ends = [*shard_ends(np.array(prefixes, np.uint32), PIECE), len(stems)]
        for start, end in zip([0, *ends], ends, strict=False):
            part = [file for files_of_stem in stems[start:end] for file in files_of_stem]
            if captions := _captions([file.name for file in part]):
                more = files.of_pictures(captions)
                read = partial(self._captioned, captions, files)
                yield lists.piece_of(self.settings, [*part, *more], read)

    def pictures(self, places: Iterable[lists.PictureLocation]) -> Iterator[bytes | None]:
        return (_bytes_at(place.file) for place in places)

    def files(self) -> FolderFiles:
        """Its files by their part. Raises Refused if it is no folder."""
        with source_files.reading(self.settings.path):
            fs, root = url_to_fs(self.settings.path)
            if not source_files.is_folder(fs, root):
                raise Refused(f"{self.settings.path}: no such folder", setting="source.path")
        files = sorted(
            source_files.list_files(self.settings.path, ("",)), key=lambda file: _folded(file.name)
        )
        beside = dict[str, dict[str, source_files.ListedFile]]()
        for name in BESIDE:
            if getattr(self.settings, name) == "files":
                files, beside[name] = self._split(files, name)
        files, references = self._without_references(files)
        folder_files = FolderFiles(_tables(file.name for file in files), [], beside, references)
        folders = {_folder(table): table for table in folder_files.tables}
        for file in files:
            table = next((folders[above] for above in _above(file.name) if above in folders), None)
            (folder_files.captioned if table is None else folder_files.tables[table]).append(file)
        return folder_files

    def _split(
        self, files: list[source_files.ListedFile], name: str
    ) -> tuple[list[source_files.ListedFile], dict[str, source_files.ListedFile]]:
        """The other files, and picture -> its mask or control picture, by `name`.

        Stems below their folders are compared, in any case.
        """
        folder = getattr(self.settings, f"{name}_folder")
        beside = dict[str | None, source_files.ListedFile]()
        if folder is None:
            ends = BESIDE[name]
            beside = {_picture_of(f.name, ends): f for f in files if _has(f.name, *PICTURES)}
            beside.pop(None, None)
            stems = {file.name: _folded(file.name) for file in files}
        else:
            root, own_root = (url_to_fs(path)[1] for path in (self.settings.path, folder))
            listed = source_files.list_files(folder, PICTURES)
            beside = {_folded(source_files.below(file.name, own_root)): file for file in listed}
            stems = {file.name: _folded(source_files.below(file.name, root)) for file in files}
        names = {file.name for file in beside.values()}
        others = [file for file in files if file.name not in names]
        pictures = [file.name for file in others if _has(file.name, *PICTURES)]
        return others, {n: beside[stems[n]] for n in pictures if stems[n] in beside}

    def _without_references(
        self, files: list[source_files.ListedFile]
    ) -> tuple[list[source_files.ListedFile], dict[str, list[source_files.ListedFile]]]:
        """The other files, and picture -> its references, by stems in any case."""
        if self.settings.references != "files":
            return files, {}
        references = defaultdict[str, list[source_files.ListedFile]](list)
        if not self.settings.reference_folders:
            named = {f.name: _picture_of_reference(f.name) for f in files}
            numbered = [(*place, f) for f in files if (place := named[f.name]) is not None]
            for stem, _, file in sorted(numbered, key=lambda item: item[:2]):
                references[stem].append(file)
            others = [file for file in files if named[file.name] is None]
            pictures = [file.name for file in others if _has(file.name, *PICTURES)]
            return others, {n: own for n in pictures if (own := references.get(_folded(n)))}
        root = url_to_fs(self.settings.path)[1]
        pictures = [file.name for file in files if _has(file.name, *PICTURES)]
        stems = {name: _folded(source_files.below(name, root)) for name in pictures}
        within = set[str]()
        for folder in self.settings.reference_folders:
            folder_root = url_to_fs(folder)[1]
            listed = source_files.list_files(folder, PICTURES)
            within |= {file.name for file in listed}
            beside = _by_stem(listed, folder_root, set(stems.values()))
            for name in pictures:
                references[name] += beside.get(stems[name], ())
        others = [file for file in files if file.name not in within]
        return others, {n: own for n, own in references.items() if own and n not in within}

    def _captioned(self, captions: Mapping[str, str], files: FolderFiles) -> Iterator[pa.Table]:
        def rows() -> Iterator[dict[str, Any]]:
            for file, text in captions.items():
                caption = text_of_file(_bytes_at(text) or b"").strip()
                place = lists.PictureLocation(file, None)
                beside = _placed(files.of(file))
                references = _pictures_at(files.references.get(file, ()))
                yield lists.embedded_row(
                    _bytes_at(file), place, self.settings, None, caption, beside, references
                )

        return lists.hash_rows(rows())

    def _listed(self, metadata: str, files: FolderFiles) -> Iterator[pa.Table]:
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
                beside = _placed(files.of(file))
                references = _pictures_at(files.references.get(file, ()))
                yield lists.embedded_row(
                    picture, place, self.settings, values, None, beside, references
                )
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


def _picture_of(name: str, ends: Sequence[str]) -> str | None:
    """The folded stem of the picture that a file of such an end is beside; None for other files."""
    stem = _folded(name)
    end = next((end for end in ends if stem.endswith(end)), None)
    return None if end is None else stem.removesuffix(end)


def _picture_of_reference(name: str) -> tuple[str, int] | None:
    """The folded stem of the picture that has a file beside it as reference N; None: none has."""
    match = re.fullmatch(r"(.+)\.ref([1-9]\d{0,3})", _folded(name), re.DOTALL)
    return (match[1], int(match[2])) if match and _has(name, *PICTURES) else None


def _by_stem(
    files: Iterable[source_files.ListedFile], root: str, pictures: set[str]
) -> dict[str, list[source_files.ListedFile]]:
    """Picture's stem below its folder -> files of that stem, or of that stem and _0, _1, ...

    Args:
        root: the folder of the files.
        pictures: stems of all pictures; a file with one of them is of that picture alone.
    """
    numbered = []
    for file in files:
        stem = _folded(source_files.below(file.name, root))
        match = re.fullmatch(r"(.+)_(\d{1,4})", stem, re.DOTALL)
        is_numbered = match is not None and stem not in pictures
        numbered.append(
            (match[1], int(match[2]), file) if match and is_numbered else (stem, -1, file)
        )
    by_stem = defaultdict[str, list[source_files.ListedFile]](list)
    for stem, _, file in sorted(numbered, key=lambda item: item[:2]):
        by_stem[stem].append(file)
    return by_stem


def _picture_at(file: source_files.ListedFile | None) -> tuple[bytes, lists.PictureLocation] | None:
    picture = None if file is None else _bytes_at(file.name)
    if file is None or picture is None:
        return None
    return picture, lists.PictureLocation(file.name, None)


def _pictures_at(
    files: Iterable[source_files.ListedFile],
) -> list[tuple[bytes, lists.PictureLocation]]:
    return [placed for placed in map(_picture_at, files) if placed is not None]


def _placed(
    files: Mapping[str, source_files.ListedFile],
) -> dict[str, tuple[bytes, lists.PictureLocation]]:
    """Bytes and place of each file, those that are still there."""
    placed = {name: _picture_at(file) for name, file in files.items()}
    return {name: picture for name, picture in placed.items() if picture is not None}


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
