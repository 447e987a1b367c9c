"""The demo's digits and dataset: pictures in a style new to the base, others in known styles.

The pictures of the demo: handwritten digits in coloured ink on coloured paper.
"""

import hashlib
import io
import json
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from demo import captions
from demo.captions import BASE_STYLES, NEW_STYLE, STYLES, style_index

Split = Literal["train", "held_out", "all"]

SIZE = 32  # width and height of every picture, in pixels
HELD_OUT = 500  # of scikit-learn's 1,797 digits


@cache
def _load_all() -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.bool_]]:
    # Imported on demand: the import lasts a second, and most callers need only captions.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    x8 = (data.images / 16).astype(np.float32)
    labels = data.target.astype(np.int64)
    _, held_out = train_test_split(
        np.arange(len(labels)), test_size=HELD_OUT, random_state=0, stratify=labels
    )
    is_held_out = np.zeros(len(labels), bool)
    is_held_out[held_out] = True
    for array in (x8, labels, is_held_out):
        array.flags.writeable = False  # shared by every caller of this process
    return x8, labels, is_held_out


def load(split: Split = "all") -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Digits [N, 8, 8] in 0..1 and labels [N]: 1,297 for training, 500 held out, or all 1,797."""
    x8, labels, is_held_out = _load_all()
    if split == "all":
        return x8, labels
    keep = is_held_out if split == "held_out" else ~is_held_out
    return x8[keep], labels[keep]


def strokes(
    x8: NDArray[np.float32], rng: np.random.Generator, wobble: float = 1.0
) -> NDArray[np.float32]:
    """Crisp ink coverage [B, 32, 32] in 0..1 of digits [B, 8, 8], slightly warped at random.

    `wobble` scales the random part of the warp: 0 draws every digit straight.
    """
    count = len(x8)
    pad = 4
    cell = 16
    centre = np.array([0, 1.12, 0, 0, 0, 0.42])
    spread = np.array([0.12, 0.08, 0.08, 0.06, 0.12, 0.07]) * wobble
    drawn = centre + spread * rng.uniform(-1, 1, (count, 6))
    angle, scale, right, down, shear, level = drawn.T[:, :, None, None]
    line = (np.arange(SIZE) + 0.5) / SIZE * 2 - 1
    x = line[None, None, :]
    y = line[None, :, None]
    cos = np.cos(angle) * scale
    sin = np.sin(angle) * scale
    columns = (cos * x + (shear - sin) * y + right) * 4 + 3.5 + pad
    rows = (sin * x + cos * y + down) * 4 + 3.5 + pad

    # SciPy warps one tall image of padded cells in a single call. The spline is fitted before the
    # cells are joined, so that no digit affects its neighbours.
    cells = np.pad(x8.astype(np.float64), ((0, 0), (pad, pad), (pad, pad)))
    for axis in (1, 2):
        cells = ndimage.spline_filter1d(cells, order=3, axis=axis)
    tall_rows = rows + cell * np.arange(count)[:, None, None]
    grey = ndimage.map_coordinates(
        cells.reshape(count * cell, cell), [tall_rows, columns], order=3, prefilter=False
    )
    return (1 / (1 + np.exp(-14 * (grey - level)))).astype(np.float32)


def render(
    x8: NDArray[np.float32], style: NDArray[np.integer], rng: np.random.Generator
) -> NDArray[np.uint8]:
    """Pictures [B, 32, 32, 3] of digits [B, 8, 8], each in the style STYLES[style[b]]."""
    ink_rgb = np.array([s.ink_rgb for s in STYLES], np.float32)[style][:, None, None, :]
    paper_rgb = np.array([s.paper_rgb for s in STYLES], np.float32)[style][:, None, None, :]
    cover = strokes(x8, rng)

    # Grain is sampled for every picture, grainy or not: the random stream then does not depend on
    # the styles, and one seed has the same handwriting in each of them.
    coarse = rng.random((len(x8), SIZE // 2, SIZE // 2), np.float32)
    grain = ndimage.zoom(coarse, (1, 2, 2), order=1)
    grainy = np.array([s.grainy for s in STYLES])[style][:, None, None]
    cover = np.where(grainy, cover * np.minimum(0.55 + 0.6 * grain, 1), cover)[..., None]

    light = 1 + rng.uniform(-0.06, 0.06, (len(x8), 1, 1, 1)).astype(np.float32)
    colour = light * (paper_rgb * (1 - cover) + ink_rgb * cover)
    return colour.round().clip(0, 255).astype(np.uint8)


LIST = "urls.parquet"
NOTE = "recipe.json"
REHEARSAL = 900  # half the number of new pictures; without them the model forgets old styles


def _png(picture: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG", compress_level=6)
    return buffer.getvalue()


@dataclass(frozen=True)
class Drawn:
    """A picture of the dataset."""

    number: int
    png: bytes
    caption: str
    reference: bytes | None = None  # PNG of the same handwriting in a style of the base


def _pictures(
    seed: int, count: int, rehearsal: int, style: str, references: bool
) -> Iterator[Drawn]:
    """The pictures, both kinds in one random order.

    No picture depends on `count`: a larger one adds pictures and keeps the order of the others.
    """
    rng = np.random.default_rng(seed)
    x8, labels = load("all")
    again = rng.choice(len(x8), rehearsal, replace=rehearsal > len(x8))
    new = np.full(len(x8), style_index(style))
    # Each base style is as frequent as the others.
    known = rng.permutation(np.resize([style_index(name) for name in BASE_STYLES], rehearsal))
    rows = np.concatenate([np.arange(len(x8)), again])
    styles = np.concatenate([new, known])
    for number in rng.permutation(len(rows)):
        if count <= number < len(x8):
            continue
        own = np.random.default_rng([seed, number])
        row = rows[number]
        (picture,) = render(x8[row, None], styles[number, None], own)
        asked = int(styles[number])
        if not references:
            yield Drawn(int(number), _png(picture), captions.caption(int(labels[row]), asked, own))
            continue
        others = [index for index in map(style_index, BASE_STYLES) if index != asked]
        before = own.choice(others, 1)
        # Equal seeds have equal strokes in each style.
        (reference,) = render(x8[row, None], before, np.random.default_rng([seed, number]))
        text = captions.edit_caption(asked, own)
        yield Drawn(int(number), _png(picture), text, _png(reference))


def _fill(
    folder: Path, seed: int, count: int, rehearsal: int, style: str, references: bool
) -> None:
    # Imported on demand: the import lasts a third of a second, and other callers do not need it.
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name in ("images", "references") if references else ("images",):
        (folder / name).mkdir()
    rows = []
    for drawn in _pictures(seed, count, rehearsal, style, references):
        url = f"images/{drawn.number:05d}.png"
        (folder / url).write_bytes(drawn.png)
        sha256 = hashlib.sha256(drawn.png).hexdigest()
        row = {"url": url, "caption": drawn.caption, "sha256": sha256}
        if drawn.reference is not None:
            row["reference"] = f"references/{drawn.number:05d}.png"
            (folder / row["reference"]).write_bytes(drawn.reference)
            row["reference_sha256"] = hashlib.sha256(drawn.reference).hexdigest()
        rows.append(row)
    pq.write_table(pa.Table.from_pylist(rows), folder / LIST)


def _is_whole(folder: Path, recipe: dict[str, Any]) -> bool:
    """Whether `folder` holds this recipe's pictures, byte for byte as they were written."""
    import pyarrow.parquet as pq

    try:
        note = json.loads((folder / NOTE).read_text())
        listed = (folder / LIST).read_bytes()
        if note != recipe | {"list": hashlib.sha256(listed).hexdigest()}:
            return False
        rows = pq.read_table(io.BytesIO(listed)).to_pylist()
        files = [(row["url"], row["sha256"]) for row in rows]
        files += [(r["reference"], r["reference_sha256"]) for r in rows if "reference" in r]
        digests = (hashlib.sha256((folder / path).read_bytes()) for path, _ in files)
        return all(d.hexdigest() == sha256 for d, (_, sha256) in zip(digests, files, strict=True))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False


def _replace(new: Path, folder: Path, recipe: dict[str, Any]) -> None:
    """Replace `folder` by `new`, unless another process has just done so."""
    if _is_whole(folder, recipe):
        return
    with suppress(FileNotFoundError):
        folder.rename(new.parent / "old")  # deleted with the scratch folder
    try:
        new.rename(folder)
    except OSError:
        if not _is_whole(folder, recipe):
            raise


def write(
    folder: Path,
    *,
    seed: int = 0,
    count: int = 1797,
    rehearsal: int = REHEARSAL,
    style: str = NEW_STYLE,
    references: bool = False,
) -> Path:
    """Write the dataset to `folder`, deterministically, and return the path of `urls.parquet`.

    The dataset has the first `count` of the 1,797 digits in `style`, a new one, and `rehearsal`
    pictures in the base's styles; a larger `count` adds rows and changes none. Columns: `url`
    (relative to the folder, "images/00001.png"), `caption`, `sha256` (hex, of the PNG's bytes). An
    intact folder of equal arguments is reused.

    With `references`, each picture has another of the same handwriting in a style of the base: the
    columns `reference` and `reference_sha256`. Captions then name the style, and leave the digit
    to the reference.

    Raises:
        FileExistsError: `folder` has files that this function did not write.
    """
    recipe: dict[str, Any] = {"seed": seed, "count": count, "rehearsal": rehearsal, "version": 2}
    if style != NEW_STYLE:
        recipe["style"] = style
    if references:
        recipe["references"] = True
    if _is_whole(folder, recipe):
        return folder / LIST
    if folder.exists() and any(folder.iterdir()) and not (folder / NOTE).exists():
        raise FileExistsError(
            f"{folder} holds files that the demo did not write: choose an empty or a new folder"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        _fill(new, seed, count, rehearsal, style, references)
        digest = hashlib.sha256((new / LIST).read_bytes()).hexdigest()
        (new / NOTE).write_text(json.dumps(recipe | {"list": digest}, indent=2) + "\n")
        _replace(new, folder, recipe)
    return folder / LIST
