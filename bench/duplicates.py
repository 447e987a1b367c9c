"""Groups of duplicates, for `python -m bench.describe`: copies that are found, time and memory.

`python -m bench.duplicates KIND COUNT` groups made-up hashes or embeddings in a process of its own.
One picture in 100 is a copy: of its hash, 0 to 8 bits differ; its embedding has noise.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from PIL import Image

from bench.near_duplicates import COPIES, PHASH_BITS, tiles
from bench.report import Meter, Rounds, Row, Skip, run_module, spread
from configs.settings.select import Select
from tasks.describe.describers import Picture, Spec
from tasks.describe.pixels import Hash
from tasks.encode.near_duplicates import SIDE
from tasks.select import duplicates
from tasks.select.groups import group_pictures

TILE = 128  # side of a tile, pixels
SIDES = (128, 256, 512)  # of pictures that are hashed alone
ORIGINALS = 200  # tiles that have copies
#: Correlations of thumbnails that are tried: crops correlate less, and so do unlike drawings.
CORRELATIONS = (0.92, 0.94, 0.985)
#: Pictures per batch of made-up descriptions, and one in so many that has a copy.
BATCH = 1 << 16
COPIED = 100
BITS = 9
WIDTH = 512
NOISE = 0.2  # the cosine of a copy and its original is 0.98
COUNTS = {"hashes": 10_000_000, "embeddings": 1_000_000}
DESCRIBERS = {"hashes": {"perceptual": "hash"}, "embeddings": {"semantic": "clip"}}
Pictures = dict[tuple[int, str], Image.Image]  # (number of the tile, kind of copy) -> RGB
Group = Callable[[Sequence[Image.Image]], duplicates.Rows]


def planted_pictures() -> Pictures:
    """All tiles, and copies of some. Raises ImportError without the photographs."""
    found = tiles(TILE)
    pictures = {(number, "original"): tile for number, tile in enumerate(found)}
    copied = np.random.default_rng(0).choice(len(found), ORIGINALS, replace=False)
    return pictures | {
        (number, kind): make(found[number])
        for number in copied.tolist()
        for kind, make in COPIES.items()
    }


def ours(min_correlation: float) -> Group:
    """Groups by hashes and thumbnails."""
    hasher = Hash(Spec("hash", {}, {}), "cpu")

    def group(pictures: Sequence[Image.Image]) -> duplicates.Rows:
        prepared = [hasher.prepare(Picture(picture, "")) for picture in pictures]
        hashes, mirrored, thumbnails = zip(*prepared, strict=True)
        grey = np.frombuffer(b"".join(thumbnails), np.uint8).reshape(-1, SIDE, SIDE)
        rows = duplicates.ungrouped(len(pictures))
        arrays = (np.array(hashes, np.uint64), np.array(mirrored, np.uint64))
        limits = (PHASH_BITS, min_correlation)
        return duplicates.join_near_hashes(rows, rows, *arrays, grey.__getitem__, *limits)

    return group


def by_imagededup() -> Group:
    """Groups by imagededup's PHash, closed transitively. Raises ImportError."""
    from imagededup.methods import PHash

    hasher = PHash(verbose=False)

    def group(pictures: Sequence[Image.Image]) -> duplicates.Rows:
        arrays = (np.asarray(picture) for picture in pictures)
        encodings = {str(n): hasher.encode_image(image_array=a) for n, a in enumerate(arrays)}
        near = hasher.find_duplicates(
            encoding_map=encodings, max_distance_threshold=PHASH_BITS, num_dist_workers=0
        )
        pairs = [(int(row), int(other)) for row, others in near.items() for other in others]
        some, others = np.array(pairs, np.int64).reshape(-1, 2).T
        return duplicates.join(duplicates.ungrouped(len(pictures)), some, others)

    return group


def found_copies(name: str, groups: duplicates.Rows, pictures: Pictures) -> dict[str, Any]:
    """Shares of copies in the group of their original, and false joins."""
    of = dict(zip(pictures, groups.tolist(), strict=True))
    figures: dict[str, Any] = {}
    for kind in COPIES:
        found = [row == of[number, "original"] for (number, k), row in of.items() if k == kind]
        figures[f"{name}_{kind}_found"] = round(float(np.mean(found)), 3)
    tiles_of = {(group, number) for (number, _), group in of.items()}
    return figures | {f"{name}_false_joins": len(tiles_of) - len({group for group, _ in tiles_of})}


def compared_row(rounds: Rounds, name: str, *, quick: bool) -> Row:
    """`rate_per_core_C`: pictures per CPU second, over that of imagededup's PHash, if installed.

    Both sides have decoded pictures; the rates are medians over rounds in turns.
    """
    try:
        pictures = planted_pictures()
    except ImportError as error:
        raise Skip(str(error)) from None
    images = [*pictures.values()]
    sides = {f"{least}": ours(least) for least in CORRELATIONS}
    with suppress(ImportError):
        sides["imagededup"] = by_imagededup()
    figures: dict[str, Any] = {"pictures": len(images)}
    for side, group in sides.items():
        figures |= found_copies(side, group(images), pictures)

    def rate(group: Group, folder: Path) -> float:
        meter = Meter()
        group(images)
        return len(images) / meter.elapsed()[1]

    measured = rounds.alternate(*(partial(rate, group) for group in sides.values()))
    rates = {side: spread(found) for side, found in zip(sides, measured, strict=True)}
    figures |= {f"{side}_pictures_per_cpu_second": found for side, found in rates.items()}
    other = rates.pop("imagededup", None)
    ratios = {
        f"rate_per_core_{side}": found["median"] / other["median"]
        for side, found in rates.items()
        if other
    }
    with suppress(ImportError):
        ratios |= hash_ratios(rounds, images[:100])
    return Row(name, ratios, figures)


def hash_ratios(rounds: Rounds, images: Sequence[Image.Image]) -> dict[str, float]:
    """`hash_rate_SIDE`: hashes per CPU second of pictures SIDE pixels wide, over imagededup's."""
    from imagededup.methods import PHash

    theirs = PHash(verbose=False)
    hasher = Hash(Spec("hash", {}, {}), "cpu")

    def seconds(hash_one: Callable[[Any], object], some: Sequence[Any], folder: Path) -> float:
        meter = Meter()
        for picture in some:
            hash_one(picture)
        return meter.elapsed()[1]

    ratios = {}
    for side in SIDES:
        resized = [image.resize((side, side)) for image in images]
        pictures = [Picture(image, "") for image in resized]
        arrays = [np.asarray(image) for image in resized]
        ours, other = rounds.alternate(
            partial(seconds, hasher.prepare, pictures),
            partial(seconds, lambda array: theirs.encode_image(image_array=array), arrays),
        )
        ratios[f"hash_rate_{side}"] = spread(other)["median"] / spread(ours)["median"]
    return ratios


def grouping_row(rounds: Rounds, name: str, *, quick: bool) -> Row:
    """Time, memory and copies found of grouping made-up hashes or embeddings."""
    count = COUNTS[name] // (1000 if quick else 1)
    return Row(name, figures=run_module("bench.duplicates", name, str(count)))


class MadeUp:
    """Descriptions of made-up pictures, the same at each reading."""

    def __init__(self, count: int) -> None:
        self.sizes = [min(BATCH, count - start) for start in range(0, count, BATCH)]

    def read(self, columns: Sequence[str]) -> pa.RecordBatchReader:
        """Ids, and some of the columns."""
        batches = self._batches(columns)
        first = next(batches)
        rest = (batch for some in ([first], batches) for batch in some)
        return pa.RecordBatchReader.from_batches(first.schema, rest)

    def _batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        for seed, size in enumerate(self.sizes):
            values = {"id": _bytes(np.random.default_rng(seed).bytes(32 * size), 32)}
            for column in columns:
                rng = np.random.default_rng((seed, len(column)))
                values[column] = getattr(self, column)(rng, size, size // COPIED)
            yield pa.RecordBatch.from_pydict(values)

    def hash_phash(self, rng: np.random.Generator, size: int, copies: int) -> pa.Array:
        hashes = rng.integers(0, 2**64, size, np.uint64)
        for row in range(copies):
            places = rng.permutation(64)[: row % BITS].astype(np.uint64)
            changed = np.bitwise_or.reduce(np.uint64(1) << places, initial=np.uint64(0))
            hashes[size - copies + row] = hashes[row] ^ changed
        return pa.array(hashes)

    def hash_mirrored(self, rng: np.random.Generator, size: int, copies: int) -> pa.Array:
        return pa.array(rng.integers(0, 2**64, size, np.uint64))

    def hash_thumbnail(self, rng: np.random.Generator, size: int, copies: int) -> pa.Array:
        grey = rng.integers(0, 252, (size, SIDE * SIDE), np.uint8)
        noise = rng.integers(0, 4, (copies, SIDE * SIDE), np.uint8)
        grey[size - copies :] = grey[:copies] + noise
        return _bytes(grey.tobytes(), SIDE * SIDE)

    def clip(self, rng: np.random.Generator, size: int, copies: int) -> pa.Array:
        vectors = rng.standard_normal((size, WIDTH), np.float32)
        noise = NOISE * rng.standard_normal((copies, WIDTH), np.float32)
        vectors[size - copies :] = vectors[:copies] + noise
        offsets = WIDTH * np.arange(size + 1, dtype=np.int32)
        return pa.ListArray.from_arrays(offsets, vectors.reshape(-1))


def _bytes(data: bytes, width: int) -> pa.Array:
    buffers = [None, pa.py_buffer(data)]
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(data) // width, buffers)


def main(arguments: Sequence[str]) -> int:
    """Group made-up pictures in this process, and print the figures."""
    kind, count = arguments[0], int(arguments[1])
    made_up = MadeUp(count)
    select = Select.model_validate({"duplicates": DESCRIBERS[kind]})
    with tempfile.TemporaryDirectory(prefix="kiln-bench-") as folder, duckdb.connect() as db:
        db.execute(f"set memory_limit = '1GB'; set temp_directory = '{folder}'")
        db.register("reader", made_up.read([]))
        db.execute("create table listed as from reader")
        meter = Meter()
        groups = group_pictures(db, made_up.read, select, Path(folder))
        figures = meter.figures()
        db.register("groups", groups)
        db.register("reader", made_up.read([]))
        numbered = "(select id, row_number() over () as number from reader)"
        query = f"select kiln_similar from {numbered} join groups using (id) order by number"
        in_order = db.sql(query).to_arrow_table()["kiln_similar"].to_numpy()
    found = []
    for start in range(0, count, BATCH):
        batch = in_order[start : start + BATCH]
        copies = len(batch) // COPIED
        found.append(batch[len(batch) - copies :] == batch[:copies])
    all_found = np.concatenate(found)
    joins = count - len(np.unique(in_order))
    figures |= {"pictures": count, "copies_found": round(float(all_found.mean()), 4)}
    print(json.dumps(figures | {"false_joins": joins - int(all_found.sum())}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
