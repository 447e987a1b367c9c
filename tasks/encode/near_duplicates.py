"""Near-duplicates: thumbnails of pictures, and training pictures that resemble a held-out one.

A picture that was saved again, resized or mirrored has another sha256, so the split may separate it
from its original. Such training pictures are left out of training; no picture changes its split.

A thumbnail shard has the thumbnails of an image shard. Other encoders and sizes reuse it, and so do
grown sets.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from artifacts.filesystems import ask_at_once
from artifacts.latent_shards import LeftOut, read_ids
from artifacts.records import digest_json, read_checked
from artifacts.store import Shard, Store
from runtimes.process.launcher import count_cores
from tasks.encode.crop_to_bucket import STAGE, BadSample, decode, is_holdout
from tasks.pictures import PictureShard
from tasks.progress import Report

SIDE = 16  # of a thumbnail, pixels
#: Correlation of thumbnails from which pictures are near-duplicates (docs/benchmarks-data.md).
LEAST_CORRELATION = 0.96
BLOCK = 1024  # pictures on each side of a matrix product
SUFFIX = ".npy"
#: The sha256 of a downloaded picture, and the picture's thumbnail.
THUMBNAIL = np.dtype([("id", "V32"), ("grey", "u1", (SIDE, SIDE))])
#: Increment when thumbnails change.
VERSION = 1


def thumbnail(image: Image.Image) -> NDArray[np.uint8]:
    """The mean grey of 16 x 16 equal rectangles of a picture: u8 [16, 16]."""
    return np.asarray(image.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX))


def mirror_parts(grey: NDArray[np.uint8] | NDArray[np.float32]) -> NDArray[np.float32]:
    """Normalised thumbnails as what a mirror keeps, and what it negates: f32 [2, N, 128].

    The correlation of two thumbnails is the sum of both parts' scalar products; that of one and the
    mirror image of the other is their difference. A thumbnail without contrast correlates with
    none.

    Args:
        grey: u8 or f32 [N, 16, 16].
    """
    centred = grey - grey.mean((1, 2), keepdims=True, dtype=np.float32)
    norm = np.linalg.norm(centred, axis=(1, 2), keepdims=True)
    unit = centred / np.maximum(norm * math.sqrt(2), 1e-6)
    left = unit[..., : SIDE // 2]
    right = unit[..., : SIDE // 2 - 1 : -1]
    return np.stack([left + right, left - right]).reshape(2, len(grey), SIDE * SIDE // 2)


def near_any(grey: NDArray[np.uint8], others: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Whether each of N thumbnails u8 [N, 16, 16] is near one of M others: bool [N].

    Args:
        others: `mirror_parts` of the others, f32 [2, M, 128].
    """
    near = np.zeros(len(grey), bool)
    for start in range(0, len(grey), BLOCK):
        kept, negated = mirror_parts(grey[start : start + BLOCK])
        for first in range(0, others.shape[1], BLOCK):
            some = others[:, first : first + BLOCK]
            correlation = kept @ some[0].T + np.abs(negated @ some[1].T)
            near[start : start + BLOCK] |= (correlation >= LEAST_CORRELATION).any(axis=1)
    return near


def write_thumbnails(path: Path, thumbnails: Iterable[tuple[bytes, NDArray[np.uint8]]]) -> None:
    """Write the file of a thumbnail shard: sha256 and thumbnail of each picture."""
    with path.open("wb") as stream:
        np.save(stream, np.array([*thumbnails], THUMBNAIL))


@dataclass(frozen=True)
class Thumbnails:
    """The thumbnails of an image shard's pictures."""

    pictures: PictureShard
    max_pixels: int  # larger pictures have no thumbnail

    @property
    def key(self) -> str:
        """Key (sha256 hex) of the thumbnail shard."""
        facts: dict[str, Any] = {"tar": self.pictures.sha256, "max_pixels": self.max_pixels}
        if self.pictures.rows is not None:
            facts["rows"] = self.pictures.rows
        return digest_json({"stage": STAGE, "thumbnails": VERSION, **facts})

    def commit(self, store: Store) -> Shard:
        """Commit the thumbnail shard. Raises Damaged for another sha256 of the tar."""
        with tempfile.TemporaryDirectory(prefix="kiln-thumbnails-") as folder:
            path = Path(folder, "thumbnails")
            write_thumbnails(path, self._read())
            return store.commit_shard(STAGE, self.key, {SUFFIX: str(path)}, {})

    def _read(self) -> Iterator[tuple[bytes, NDArray[np.uint8]]]:
        """Sha256 and thumbnail of each picture."""
        for sample in self.pictures.read():
            try:
                picture = decode(sample.image, self.max_pixels)
            except BadSample:
                continue
            yield sample.source_sha256, thumbnail(picture)


def thumbnail_shards(store: Store, wanted: Sequence[Thumbnails]) -> list[Shard]:
    """The shard of each.

    The encoders commit those of new latents. Here are made those of latents of earlier checkouts,
    and those that `kiln gc` has deleted.
    """
    stored = ask_at_once(store.fs, partial(store.shard, STAGE), [one.key for one in wanted])
    with ThreadPoolExecutor(count_cores()) as threads:
        shards = threads.map(lambda one, shard: shard or one.commit(store), wanted, stored)
        return list(shards)


def split_thumbnails(
    store: Store, shard: Shard, holdout: float, kept: Set[bytes] | None = None
) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """Held-out and training pictures of a thumbnail shard, [N] of THUMBNAIL each.

    Args:
        holdout: fraction of the pictures in the held-out split.
        kept: sha256 of the pictures that count; None: all.

    Raises:
        Damaged: its file has another sha256.
    """
    [entry] = shard.files
    root = store.shards_path(STAGE)
    rows = np.load(BytesIO(read_checked(store.fs, root, entry.path, entry.sha256)))
    if kept is not None:
        rows = rows[np.array([sha256 in kept for sha256 in rows["id"].tolist()], bool)]
    mask = np.array([is_holdout(sha256, holdout) for sha256 in rows["id"].tolist()], bool)
    return rows[mask], rows[~mask]


def copies_of_held_out(
    store: Store,
    latents: Sequence[Shard],
    thumbnails: Sequence[Shard],
    kept: Sequence[Set[bytes] | None],
    compared: Sequence[Shard],
    holdout: float,
    progress: Report,
) -> LeftOut:
    """The training samples of latent shards that are near-duplicates of held-out pictures.

    Args:
        thumbnails: thumbnail shards of the same pictures as `latents`, in their order.
        kept: for each of them, sha256 of the pictures that are selected; None: all.
        compared: thumbnail shards of further held-out pictures.
        holdout: fraction of the pictures in the held-out split.

    Raises:
        Damaged: a thumbnail shard has another sha256.
    """
    held_out = [
        split_thumbnails(store, shard, holdout, some)[0]["grey"]
        for shard, some in zip(
            (*thumbnails, *compared), (*kept, *(None for _ in compared)), strict=True
        )
    ]
    others = mirror_parts(np.concatenate(held_out))
    left_out: LeftOut = {}
    total = len(latents)
    for number, (shard, of_shard, some) in enumerate(
        zip(latents, thumbnails, kept, strict=True), 1
    ):
        training = split_thumbnails(store, of_shard, holdout, some)[1]
        copies = set(training["id"][near_any(training["grey"], others)].tolist())
        if copies and (rows := _rows(store, shard, copies)):
            left_out[shard.key] = rows
        words = f"{number:,} of {total:,} shards searched for copies of held-out pictures"
        progress(number, total, words)
    return left_out


def _rows(store: Store, shard: Shard, copies: set[bytes]) -> dict[str, dict[int, str]]:
    """The rows of pictures in a latent shard, as a value of LeftOut."""
    [entry] = shard.files
    ids = read_ids(store.fs, f"{store.shards_path(STAGE)}/{entry.path}")
    found = {
        group: {row: sha256.hex() for row, sha256 in enumerate(rows) if sha256 in copies}
        for group, rows in ids.items()
    }
    return {group: rows for group, rows in found.items() if rows}


def copies_facts(settings: Mapping[str, Any], left_out: int) -> dict[str, str]:
    """What became of the near-duplicates of held-out pictures, for people.

    Args:
        settings: those of the section `encode`.
        left_out: number of the pictures that training left out.
    """
    if not settings["holdout"]:
        return {}
    words = f"{left_out:,} left out of training"
    if not settings["leave_out_copies"]:
        words = "may be in training (encode.leave_out_copies: false)"
    return {"near-duplicates of held-out pictures": words}
