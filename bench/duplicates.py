"""Descriptions and groups of duplicates: `python -m bench.describe duplicates|groups`.

* `duplicates`: tiles of photographs and their copies, as files, are hashed and grouped by Kilnworks,
  and by imagededup's PHash with its own limit of 10 bits; each on one core. The package scikit-image
  has the photographs; imagededup is left out if it is not installed.
* `groups`: made-up hashes and embeddings are grouped, each in a process of its own. One picture in
  100 is a copy: of its original's bits, up to 8 differ, or its embedding has noise.
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
from numpy.typing import NDArray
from PIL import Image

from bench import report
from bench.near_duplicates import COPIES, PHASH_BITS, tiles
from configs.settings.select import Select
from tasks.describe.describers import Picture, Spec
from tasks.describe.pixels import Hash
from tasks.encode.crop_to_bucket import decode
from tasks.select import duplicates
from tasks.select.groups import group_pictures

SIDE = 128  # of a tile, pixels
ORIGINALS = 200  # tiles that have copies
MAX_PIXELS = 1 << 26
#: Pictures per batch of the made-up descriptions, and one in so many that has a copy.
BATCH = 1 << 16
COPIED = 100
BITS = 9  # a copy has 0 to 8 changed bits
WIDTH = 512
NOISE = 0.2  # of a copied embedding, whose cosine with the original is 0.98
Group = Callable[[Sequence[Path]], duplicates.Rows]


def write_pictures(folder: Path) -> dict[Path, tuple[int, str]]:
    """The files of all tiles, and of the copies of some: file -> number of its tile, and kind."""
    written = {}
    found = tiles(SIDE)
    copied = set(np.random.default_rng(0).choice(len(found), ORIGINALS, replace=False).tolist())
    for number, tile in enumerate(found):
        makes = {"original": Image.Image.copy, **(COPIES if number in copied else {})}
        for kind, make in makes.items():
            path = folder / f"{number}-{kind}.png"
            make(tile).save(path)
            written[path] = (number, kind)
    return written


def ours(files: Sequence[Path]) -> duplicates.Rows:
    """Groups by hashes and thumbnails."""
    hasher = Hash(Spec("hash", {}, {}), "cpu")
    prepared = [hasher.prepare(Picture(decode(f.read_bytes(), MAX_PIXELS), "")) for f in files]
    hashes, mirrored, thumbnails = zip(*prepared, strict=True)
    grey = np.frombuffer(b"".join(thumbnails), np.uint8).reshape(-1, 16, 16)
    rows = duplicates.ungrouped(len(files))
    arrays = (np.array(values, np.uint64) for values in (hashes, mirrored))
    return duplicates.join_near_hashes(rows, rows, *arrays, grey, PHASH_BITS)


def by_imagededup() -> Group:
    """Groups by imagededup's PHash, closed transitively."""
    from imagededup.methods import PHash

    hasher = PHash(verbose=False)

    def group(files: Sequence[Path]) -> duplicates.Rows:
        encodings = {str(file): hasher.encode_image(file) for file in files}
        near = hasher.find_duplicates(
            encoding_map=encodings, max_distance_threshold=PHASH_BITS, num_dist_workers=0
        )
        row = {str(file): number for number, file in enumerate(files)}
        pairs = [(row[file], row[other]) for file, others in near.items() for other in others]
        some, others = np.array(pairs, np.int64).reshape(-1, 2).T
        return duplicates.join(duplicates.ungrouped(len(files)), some, others)

    return group


def quality(group: Group, written: dict[Path, tuple[int, str]]) -> dict[str, Any]:
    """Shares of copies in the group of their original, false joins, and the rate."""
    files = [*written]
    meter = report.Meter()
    groups = group(files)
    _, cpu = meter.elapsed()
    of = dict(zip(written.values(), groups.tolist(), strict=True))
    figures: dict[str, Any] = {
        f"{kind}_found": round(
            float(np.mean([g == of[n, "original"] for (n, k), g in of.items() if k == kind])), 3
        )
        for kind in COPIES
    }
    together = {(group, number) for (number, _), group in of.items()}
    figures["false_joins"] = len(together) - len({group for group, _ in together})
    return figures | {"pictures": len(files), "pictures_per_cpu_second": round(len(files) / cpu, 1)}


def compare() -> Iterator[report.Row]:
    """Both sides on the same files."""
    with tempfile.TemporaryDirectory(prefix="kiln-bench-") as folder:
        written = write_pictures(Path(folder))
        rates = []
        for name, make in (("kilnworks", lambda: ours), ("imagededup_phash", by_imagededup)):
            try:
                group = make()
            except ImportError as error:
                yield report.Row(name, skipped=str(error))
                continue
            group([*written][:20])  # what is imported at the first call
            figures = quality(group, written)
            rates.append(figures["pictures_per_cpu_second"])
            ratios = {"rate_per_core": rates[0] / rates[1]} if len(rates) == 2 else {}
            yield report.Row(name, ratios, figures)


class MadeUp:
    """Descriptions of made-up pictures, the same at each reading; some are copies of others."""

    def __init__(self, count: int) -> None:
        self.starts = range(0, count, BATCH)
        self.count = count

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Ids, and some of the columns."""
        for start in self.starts:
            size = min(BATCH, self.count - start)
            copies = size // COPIED
            rng = np.random.default_rng(start)
            ids = pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(32), size, [None, pa.py_buffer(rng.bytes(32 * size))]
            )
            values = {"id": ids} | {c: getattr(self, c)(rng, size, copies) for c in columns}
            yield pa.RecordBatch.from_pydict(values)

    def read(self, columns: list[str]) -> pa.RecordBatchReader:
        batches = self.batches(columns)
        first = next(batches)

        def every() -> Iterator[pa.RecordBatch]:
            yield first
            yield from batches

        return pa.RecordBatchReader.from_batches(first.schema, every())

    def hash_phash(self, rng: np.random.Generator, size: int, copies: int) -> pa.Array:
        hashes = rng.integers(0, 2**64, size, np.uint64)
        for row in range(copies):
            places = rng.permutation(64)[: row % BITS].astype(np.uint64)
            hashes[size - copies + row] = hashes[row] ^ np.bitwise_or.reduce(
                np.left_shift(np.uint64(1), places), initial=np.uint64(0)
            )
        return pa.array(hashes)

    def hash_mirrored(self, rng: np.random.Generator, size: int, copies: int) -> pa.Array:
        return pa.array(rng.integers(0, 2**64, size, np.uint64))

    def hash_thumbnail(self, rng: np.random.Generator, size: int, copies: int) -> pa.Array:
        grey = rng.integers(0, 252, (size, 256), np.uint8)
        grey[size - copies :] = grey[:copies] + rng.integers(0, 4, (copies, 256), np.uint8)
        data = pa.py_buffer(grey.tobytes())
        return pa.FixedSizeBinaryArray.from_buffers(pa.binary(256), size, [None, data])

    def clip(self, rng: np.random.Generator, size: int, copies: int) -> pa.Array:
        vectors = rng.standard_normal((size, WIDTH), np.float32)
        noise = NOISE * rng.standard_normal((copies, WIDTH), np.float32)
        vectors[size - copies :] = vectors[:copies] + noise
        offsets = np.arange(0, vectors.size + 1, WIDTH, np.int32)
        return pa.ListArray.from_arrays(offsets, vectors.reshape(-1))


def grouped(kind: str, count: int) -> dict[str, Any]:
    """Figures of grouping made-up pictures in this process."""
    made_up = MadeUp(count)
    chosen = {"perceptual": "hash"} if kind == "hashes" else {"semantic": "clip"}
    select = Select.model_validate({"duplicates": chosen})
    with tempfile.TemporaryDirectory(prefix="kiln-bench-") as folder, duckdb.connect() as db:
        db.execute("set memory_limit = '1GB'")
        db.execute(f"set temp_directory = '{folder}'")
        ids = [batch["id"] for batch in made_up.batches([])]
        listed = pa.table({"id": pa.chunked_array(ids)})
        db.register("listed", listed)
        meter = report.Meter()
        groups = group_pictures(db, made_up.read, select, Path(folder))
        figures = meter.figures()
    row_of = {"id": groups["id"].cast(pa.binary(32)), "group": groups["kiln_similar"]}
    joined = listed.append_column("row", pa.array(np.arange(count))).join(
        pa.table(row_of), "id", join_type="inner"
    )
    in_order = joined.sort_by("row")["group"].to_numpy()
    found: NDArray[np.bool_] = np.concatenate(
        [_found(in_order[start : start + BATCH]) for start in made_up.starts]
    )
    wrong = count - len(found) - len(np.unique(in_order))
    bits = np.concatenate([np.arange(len(found)) * 0])
    del bits
    return figures | {"copies_found": round(float(found.mean()), 4), "false_joins": max(0, wrong)}


def _found(groups: duplicates.Rows) -> NDArray[np.bool_]:
    """Whether each copy of a batch is in the group of its original."""
    copies = len(groups) // COPIED
    return np.asarray(groups[len(groups) - copies :] == groups[:copies])


def main(arguments: Sequence[str]) -> int:
    """Measure a part."""
    parser = report.option_parser("describe", __doc__)
    parser.add_argument("part", choices=["duplicates", "groups"])
    parser.add_argument("--hashes", type=int, default=10_000_000, help="default: %(default)s")
    parser.add_argument("--embeddings", type=int, default=1_000_000, help="default: %(default)s")
    parser.add_argument("--step", choices=["hashes", "embeddings"], help="one, in this process")
    options = parser.parse_args(arguments)
    counts = {kind: getattr(options, kind) for kind in ("hashes", "embeddings")}
    if options.step:
        print(json.dumps(grouped(options.step, counts[options.step])))
        return 0
    if options.part == "duplicates":
        try:
            rows = [*compare()]
        except ImportError as error:
            rows = [report.Row("kilnworks", skipped=str(error))]
        return report.finish("describe", rows, options)
    rows = []
    for kind, count in counts.items():
        step = ("groups", "--step", kind, f"--{kind}", str(count))
        figures = partial(report.run_module, "bench.describe", *step)
        rows.append(report.attempt(f"{count:,} {kind}", lambda f=figures, k=kind: report.Row(k, figures=f())))
    return report.finish("describe", rows, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
