"""Tars of other programs as sources, and their rows as the workers of a download read them."""

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fsspec
import source_rows
from picture_bytes import encode_picture
from PIL import Image
from shortest_recipe import shortest_recipe
from webdataset import TarWriter

from configs.settings.recipe import Recipe

Files = Iterable[tuple[str, bytes]]


def make_recipe(
    path: Any, store: Any = "memory://tars", *, shard_size: int = 4, **source: Any
) -> Recipe:
    return shortest_recipe(
        source={"kind": "tars", "path": str(path), **source},
        store=str(store),
        download={"shard_size": shard_size, "image_size": 16, "min_image_size": 0},
        beam={"direct_running_mode": "in_memory", "direct_num_workers": 1},
        train={"aesthetic_score": "aesthetic_column" in source},
    )


def jpg(number: int) -> bytes:
    picture = Image.new("RGB", (40, 32), (number, 60, 90))
    return encode_picture(picture, "JPEG", comment=str(number))  # no two have equal bytes


def written(path: Any, numbers: Iterable[int], **more: Any) -> str:
    """A tar by WebDataset's writer, with picture n, caption n and json n of each number."""
    buffer = io.BytesIO()
    with TarWriter(buffer) as tar:
        for n in numbers:
            values = {"caption": f"from json {n}", "score": n / 2, "licence": f"cc {n}", **more}
            tar.write({"__key__": f"{n:05}", "jpg": jpg(n), "txt": f"caption {n}", "json": values})
    with fsspec.open(str(path), "wb") as stream:
        stream.write(buffer.getvalue())
    return str(path)


def packed(path: Path, files: Files) -> Path:
    """A tar of these files, in this order."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        add_files(tar, files)
    return path


def add_files(tar: tarfile.TarFile, files: Files) -> None:
    for name, data in files:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))


def rows_of(recipe: Recipe, scratch: Path) -> list[tuple[str, bytes | None]]:
    """(first caption, picture) of all rows."""
    rows = source_rows.rows_of(recipe, scratch)
    return [(row.captions[0], Path(row.file).read_bytes() if row.file else None) for row in rows]
