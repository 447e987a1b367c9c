"""What a folder, list or data set of pictures has, found without reading more than it must.

Of a folder on this machine, pictures are opened for their sizes and near-duplicates. Of a list,
DuckDB counts the rows, and the first ones give examples of captions: no picture is fetched.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from fsspec.core import split_protocol
from PIL import Image

from configs.errors import Away, Refused
from configs.settings.data import DatasetSource, FolderSource
from configs.settings.select import Duplicates
from runtimes.process.launcher import count_cores
from tasks.beam.workers import is_hub_id
from tasks.describe.describers import Picture, Spec
from tasks.describe.pixels import Hash
from tasks.download import folders, lists, source_files
from tasks.download.rows import literal, text_of_file
from tasks.encode.near_duplicates import SIDE
from tasks.imports import kohya, parts
from tasks.select.duplicates import join_near_hashes, ungrouped
from tasks.sql_condition import quoted

#: Pictures of a folder that are opened; near-duplicates of larger folders are left to `select`.
OPENED = 3000
EXAMPLES = 8  # captions
#: Rows of a list whose captions are examples, and characters of one.
FIRST_ROWS = 200
LONGEST = 200
#: Names of columns, the likeliest first.
URL_COLUMNS = ("url", "image_url", "img_url", "link", "src")
IMAGE_COLUMNS = ("image", "img", "picture", "jpg", "png", "webp")
CAPTION_COLUMNS = ("caption", "text", "prompt", "captions", "description", "alt_text", "alt")


@dataclass(frozen=True)
class Pictures:
    """Pictures that a recipe may have as its source. None: it is not known."""

    place: str  # as the person named it
    sources: dict[str, dict[str, Any]]  # name -> entry of `sources`; one alone has the name ""
    count: int | None
    captioned: int | None  # pictures with a caption
    examples: tuple[str, ...] = ()  # captions
    sides: tuple[int, int] | None = None  # least and greatest shorter side, in pixels
    unreadable: int = 0
    near_duplicates: int | None = None
    columns: tuple[str, ...] = ()  # of a list
    word: str | None = None  # what kohya's folder calls the subject
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def has_captions(self) -> bool:
        """Whether at least half of the pictures have a caption, or it is not known."""
        unknown = self.captioned is None or self.count is None
        return unknown or 2 * (self.captioned or 0) >= (self.count or 0) > 0

    @property
    def words(self) -> str:
        """The findings in one line."""
        is_list = bool(self.columns)
        what = "rows" if is_list else "pictures"
        found = [f"an unknown number of {what}" if self.count is None else f"{self.count:,} {what}"]
        if is_list:
            found.append(f"columns {', '.join(self.columns)}")
        if self.sides is not None:
            least, most = self.sides
            found.append(f"shorter sides of {least} to {most} pixels")
        if self.captioned is not None and not is_list:
            alike = {0: "no captions", self.count: "all with captions"}
            found.append(alike.get(self.captioned, f"{self.captioned:,} with captions"))
        if self.near_duplicates is not None:
            found.append(f"{self.near_duplicates or 'no'} near-duplicates")
        if self.unreadable:
            found.append(f"{self.unreadable} that cannot be read")
        return ", ".join(found)


def look(place: str) -> Pictures:
    """Look at a folder, kohya's folder of folders, list, data set or tars.

    Raises:
        Refused: there are no pictures, or their kind is unknown.
        Away: the place does not answer now.
    """
    place = os.path.expanduser(place.strip())
    is_pattern = not set("*?[{").isdisjoint(place)
    if is_hub_id(place) and not is_pattern and _kind(place) is None:
        return _hub_dataset(place)
    is_here = split_protocol(place)[0] in (None, "file")
    if is_here and not os.path.exists(place) and not is_pattern:
        raise Refused(f"{place}: no such file or folder: name a folder, list or owner/name")
    if is_here and os.path.isdir(place) and (found := _kohya(place)) is not None:
        return found
    names = [place] if _suffix(place) else [f.name for f in _listed(place)]
    kinds = {_kind(name) for name in names}
    if "folder" in kinds:
        return _folder(place, is_here)
    if "tars" in kinds:
        source = {"kind": "tars", "path": place}
        return Pictures(place, {"": {"source": source}}, None, None)
    format = next((kind for kind in lists.FORMATS if kind in kinds), None)
    if format is None:
        raise Refused(f"{place} has no pictures, and no list of them ({_known()})")
    return _list(place, format)


def _known() -> str:
    return ", ".join((*folders.PICTURES, *(f".{name}" for name in lists.FORMATS), ".tar"))


def _listed(place: str) -> list[source_files.ListedFile]:
    try:
        return source_files.list_files(place, ("",))
    except Refused:
        raise Refused(f"{place} has no pictures: the folder is empty") from None


def _suffix(name: str) -> str:
    """The extension that says what a file is; empty for a folder."""
    end = re.sub(r"\.(gz|zst)$", "", name.partition("?")[0] if "://" in name else name)
    extension = Path(end).suffix.lower()
    return "" if os.path.isdir(name) else extension


def _kind(name: str) -> str | None:
    suffix = _suffix(name)
    if suffix in folders.PICTURES:
        return "folder"
    if suffix == ".tar":
        return "tars"
    base = re.sub(r"\.(gz|zst)$", "", name)
    formats = (n for n, f in lists.FORMATS.items() if base.lower().endswith(f.suffixes))
    return next(formats, None)


def _hub_dataset(place: str) -> Pictures:
    """A data set of the hub; its columns are guessed while the hub does not answer."""
    try:
        return _embedded(place)
    except (Away, Refused) as error:
        if isinstance(error, Refused) and "cannot be reached" not in str(error):
            raise
        note = f"{error}: columns image and text are assumed"
    entry = {"source": {"kind": "dataset", "path": place}}
    return Pictures(place, {"": entry}, None, None, notes=(note,))


def _kohya(place: str) -> Pictures | None:
    """The subsets of a folder of folders `10_name class`; None for any other folder."""
    try:
        subsets = kohya.subsets_of(place, regularises=False)
    except Refused:
        matched = kohya.FOLDER.fullmatch(Path(place).resolve().name)
        subsets = []
        if matched is None:
            return None
        word = matched[2].strip()
        found = _folder(place, True)
        return found if found.has_captions else replace(found, word=word)
    looked = [(subset, _folder(subset["image_dir"], True)) for subset in subsets]
    sources: dict[str, dict[str, Any]] = {}
    for subset, found in looked:
        entry = {**found.sources[""], "repeats": subset["num_repeats"]}
        if not found.has_captions:
            entry["encode"] = {"captions": {"prompts": [subset["class_tokens"]]}}
        sources[parts.source_name(subset["class_tokens"], sources)] = entry
    if len(sources) == 1:
        [entry] = sources.values()
        sources = {"": {"source": entry["source"]}}
    sides = [found.sides for _, found in looked if found.sides is not None]
    all_found = [found for _, found in looked]
    duplicates = [found.near_duplicates for found in all_found]
    return Pictures(
        place,
        sources,
        sum(found.count or 0 for found in all_found),
        sum(found.captioned or 0 for found in all_found),
        _spread([text for found in all_found for text in found.examples]),
        (min(s[0] for s in sides), max(s[1] for s in sides)) if sides else None,
        sum(found.unreadable for found in all_found),
        None if None in duplicates else sum(filter(None, duplicates)),
        word=max(subsets, key=lambda subset: subset["num_repeats"])["class_tokens"],
    )


def _folder(place: str, is_here: bool) -> Pictures:
    source: dict[str, Any] = {"kind": "folder", "path": place}
    files = folders.Folder(FolderSource(kind="folder", path=place)).files()
    texts = files.texts
    pictures = [*texts]
    files_of_text = [text for text in texts.values() if text is not None]
    if is_here:  # an empty file is no caption
        files_of_text = [text for text in files_of_text if os.path.getsize(text)]
    captioned = len(files_of_text)
    examples = [_read(text) for text in _spread(files_of_text)]
    for table, beside in files.tables.items():
        known = lists.FORMATS[folders.METADATA[table.rpartition("/")[2].lower()]]
        columns = known.columns(table)
        caption = _guess(columns, CAPTION_COLUMNS)
        if caption is not None:
            source["caption_column"] = caption
        named = [f.name for f in beside if f.name.lower().endswith(folders.PICTURES)]
        pictures += named
        captioned += len(named) if caption is not None else 0
    folders.Folder(FolderSource(**source)).check()
    opened = [*_opened(pictures)] if is_here else []
    sizes = [one.shorter for one in opened if one is not None]
    return Pictures(
        place,
        {"": {"source": source}},
        len(pictures),
        captioned,
        tuple(filter(None, examples)),
        (min(sizes), max(sizes)) if sizes else None,
        sum(one is None for one in opened),
        _near_duplicates([one for one in opened if one is not None])
        if is_here and len(pictures) <= OPENED
        else None,
    )


def _read(file: str) -> str:
    with source_files.reading(file), source_files.open_file(file) as stream:
        return text_of_file(stream.read()).strip()


class _Opened(NamedTuple):
    """A picture that was opened."""

    shorter: int  # pixels
    phash: int
    mirrored: int
    thumbnail: bytes


def _opened(names: Sequence[str]) -> Iterator[_Opened | None]:
    """Pictures, evenly chosen if there are many; None for each that cannot be read."""
    describer = Hash(Spec("hash", {}, {}), "cpu")

    def opened(name: str) -> _Opened | None:
        try:
            with warnings.catch_warnings(), Image.open(name) as image:
                warnings.simplefilter("ignore")
                shorter = min(image.size)
                image.draft("RGB", (256, 256))  # a large JPEG is decoded at an eighth
                values = describer.prepare(Picture(image.convert("RGB"), ""))
            return _Opened(shorter, *values)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            return None

    every = max(1, -(-len(names) // OPENED))
    with ThreadPoolExecutor(count_cores()) as threads:
        yield from threads.map(opened, names[::every])


def _near_duplicates(opened: Sequence[_Opened]) -> int:
    """The pictures that `select.duplicates` with a describer of kind hash would drop."""
    if len(opened) < 2:
        return 0
    rows = ungrouped(len(opened))
    grey = np.frombuffer(b"".join(one.thumbnail for one in opened), np.uint8)
    thumbnails = grey.reshape(-1, SIDE, SIDE)
    limits = Duplicates()
    groups = join_near_hashes(
        rows,
        rows,
        np.array([one.phash for one in opened], np.uint64),
        np.array([one.mirrored for one in opened], np.uint64),
        lambda numbers: thumbnails[numbers],
        limits.distance,
        limits.min_correlation,
    )
    return len(opened) - len(np.unique(groups))


def _list(place: str, format: str) -> Pictures:
    known = lists.FORMATS[format]
    files = [file.name for file in source_files.list_files(place, known.suffixes)]
    if format == "parquet" and _image_column(files[0]) is not None:
        return _embedded(place)
    columns = known.columns(files[0])
    url = "url" if format == "txt" else _guess(columns, URL_COLUMNS)
    if url is None:
        raise Refused(
            f"{files[0]} has no column of URLs or pictures ({', '.join(columns[:20])}): rename "
            f"one to {URL_COLUMNS[0]} or {IMAGE_COLUMNS[0]}"
        )
    caption = _guess(columns, CAPTION_COLUMNS)
    source: dict[str, Any] = {"kind": "urls", "path": place, "format": format}
    source |= {"url_column": url, "caption_column": caption}
    rows = sum(lists.count_rows(file, format) for file in files)
    return Pictures(
        place,
        {"": {"source": source}},
        rows,
        0 if caption is None else rows,
        _first_captions(files[0], format, caption),
        columns=tuple(columns),
    )


def _embedded(place: str) -> Pictures:
    """Parquet files that have the pictures."""
    settings = DatasetSource(kind="dataset", path=place)
    files = [file.name for file in folders.Dataset(settings).files()]
    columns = lists.parquet_schema(files[0]).names
    image = _image_column(files[0])
    caption = _guess(columns, CAPTION_COLUMNS)
    if image is None or caption is None:
        lacking = "pictures" if image is None else "captions"
        raise Refused(f"{files[0]} has no column of {lacking} ({', '.join(columns[:20])})")
    source = {"kind": "dataset", "path": place, "image_column": image, "caption_column": caption}
    rows = sum(lists.count_rows(file, "parquet") for file in files)
    examples = _first_captions(files[0], "parquet", caption)
    entry = {"source": source}
    return Pictures(place, {"": entry}, rows, rows, examples, columns=tuple(columns))


def _image_column(file: str) -> str | None:
    """The column of a parquet file with encoded pictures: bytes, or a struct with bytes."""
    schema = lists.parquet_schema(file)

    def has_bytes(kind: pa.DataType) -> bool:
        if pa.types.is_struct(kind):
            return kind.get_field_index("bytes") >= 0
        return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)

    return _guess([n for n in schema.names if has_bytes(schema.field(n).type)], IMAGE_COLUMNS)


def _first_captions(file: str, format: str, column: str | None) -> tuple[str, ...]:
    """Examples among the first rows of a list."""
    if column is None:
        return ()
    known = lists.FORMATS[format]
    with source_files.reading(file), lists.connection(file) as (db, path):
        name = quoted(column)
        if known.is_json:
            name = f"json_extract_string(json, {literal(f'$.{name}')})"
        query = f"select {name} from {known.table(file, path)} limit {FIRST_ROWS}"
        values = [value for (value,) in db.execute(query).fetchall()]
    texts = [v[0] if isinstance(v, list) and v else v for v in values]
    return _spread([" ".join(text.split()) for text in texts if isinstance(text, str)])


def _spread(texts: Sequence[str]) -> tuple[str, ...]:
    """Different texts of moderate length, evenly spaced."""
    chosen = [text for text in dict.fromkeys(texts) if 0 < len(text) <= LONGEST]
    every = max(1, len(chosen) // EXAMPLES)
    return tuple(chosen[::every][:EXAMPLES])


def _guess(columns: Iterable[str], names: Sequence[str]) -> str | None:
    """The column with the likeliest name, whatever its capitals."""
    folded = {column.casefold(): column for column in reversed([*columns])}
    return next((folded[name] for name in names if name in folded), None)
