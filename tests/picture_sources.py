"""A few captioned pictures, in the format of each kind of source."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from picture_bytes import encode_picture, noise_picture
from PIL import Image

SHAPES = {"wide": (60, 36), "tall": (36, 60), "square": (48, 48)}  # (width, height)
COLOURS = ("red", "green", "blue", "black")


@dataclass(frozen=True)
class Captioned:
    """A picture with its captions."""

    name: str
    shape: str  # of SHAPES
    png: bytes
    captions: tuple[str, ...]


def make_pictures(count: int = 18, captions: int = 1) -> list[Captioned]:
    """Noise pictures of alternating shapes; captions contain shape and number."""
    shapes = list(SHAPES)
    return [_picture(number, shapes[number % len(shapes)], captions) for number in range(count)]


def _picture(number: int, shape: str, captions: int) -> Captioned:
    texts = tuple(f"{COLOURS[n]} {shape} {number}" for n in range(captions))
    return Captioned(f"{number:02}", shape, noise_picture(number, *SHAPES[shape]), texts)


def thin_picture() -> Captioned:
    """A picture of 4000 x 2 pixels, whose nearest bucket is that of wide pictures."""
    picture = encode_picture(Image.new("RGB", (4000, 2), "red"))
    return Captioned("thin", "wide", picture, ("a red line",))


def write_folder(folder: Path, pictures: Sequence[Captioned]) -> None:
    """Write pictures with a .txt file of captions each."""
    folder.mkdir()
    for one in pictures:
        (folder / f"{one.name}.png").write_bytes(one.png)
        (folder / f"{one.name}.txt").write_text("\n".join(one.captions), encoding="utf-8")


def write_listed_folder(folder: Path, pictures: Sequence[Captioned]) -> None:
    """Write pictures with a metadata.jsonl, which has a list of captions per picture."""
    folder.mkdir()
    for one in pictures:
        (folder / f"{one.name}.png").write_bytes(one.png)
    lines = [{"file_name": f"{one.name}.png", "text": one.captions} for one in pictures]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (folder / "metadata.jsonl").write_text(text, encoding="utf-8")


def write_dataset(folder: Path, pictures: Sequence[Captioned]) -> None:
    """Write parquet files of two splits, in the layout of a dataset on the hub."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    rows = [
        {"image": {"bytes": one.png, "path": None}, "text": list(one.captions)} for one in pictures
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train-00000-of-00001.parquet")
    pq.write_table(pa.Table.from_pylist(rows[:1]), folder / "test-00000-of-00001.parquet")


def write_url_list(file: Path, pictures: Sequence[Captioned], base_url: str) -> None:
    """Write a parquet list with LAION's columns, but with a list of captions per row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"URL": f"{base_url}{one.name}.png", "TEXT": list(one.captions), "similarity": 0.3}
        for one in pictures
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)


def write_tars(folder: Path, pictures: Sequence[Captioned], samples: int = 7) -> None:
    """Write WebDataset tars of some samples each, by its writer; their txt is no caption."""
    from webdataset import ShardWriter

    folder.mkdir()
    with ShardWriter(f"{folder}/%05d.tar", maxcount=samples, verbose=0) as tars:
        for one in pictures:
            values = {"caption": one.captions[0]}
            tars.write({"__key__": one.name, "png": one.png, "txt": "no caption", "json": values})
