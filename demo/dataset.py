"""The demo's dataset: pictures in a style new to the base, and rehearsal in known styles."""

import hashlib
import io
import json
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from demo import captions, digits
from demo.palette import BASE_STYLES, NEW_STYLE, style_index

LIST = "urls.parquet"
NOTE = "recipe.json"
REHEARSAL = 900  # half the number of new pictures; without them the model forgets old styles


def _png(picture: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG", compress_level=6)
    return buffer.getvalue()


def _even_styles(count: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """`count` indices of base styles, each as often as the others, in random order."""
    known = [style_index(name) for name in BASE_STYLES]
    return rng.permutation(np.resize(known, count))


def _pictures(seed: int, count: int, rehearsal: int) -> Iterator[tuple[int, bytes, str]]:
    """Number, PNG bytes and caption of each picture, both kinds in one random order.

    No picture depends on `count`: a larger one adds pictures and keeps the order of the others.
    """
    rng = np.random.default_rng(seed)
    x8, labels = digits.load("all")
    again = rng.choice(len(x8), rehearsal, replace=rehearsal > len(x8))
    new = np.full(len(x8), style_index(NEW_STYLE))
    rows = np.concatenate([np.arange(len(x8)), again])
    styles = np.concatenate([new, _even_styles(rehearsal, rng)])
    for number in rng.permutation(len(rows)):
        if count <= number < len(x8):
            continue
        own = np.random.default_rng([seed, number])
        row = rows[number]
        style = styles[number]
        (picture,) = digits.render(x8[row, None], style[None], own)
        yield int(number), _png(picture), captions.caption(int(labels[row]), int(style), own)


def _fill(folder: Path, seed: int, count: int, rehearsal: int) -> None:
    # Imported on demand: the import lasts a third of a second, and other callers do not need it.
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "images").mkdir()
    rows = []
    for number, png, text in _pictures(seed, count, rehearsal):
        url = f"images/{number:05d}.png"
        (folder / url).write_bytes(png)
        rows.append({"url": url, "caption": text, "sha256": hashlib.sha256(png).hexdigest()})
    pq.write_table(pa.Table.from_pylist(rows), folder / LIST)


def _is_whole(folder: Path, recipe: dict[str, Any]) -> bool:
    """Whether `folder` holds this recipe's pictures, byte for byte as they were written."""
    import pyarrow.parquet as pq

    try:
        note = json.loads((folder / NOTE).read_text())
        listed = (folder / LIST).read_bytes()
        if note != recipe | {"list": hashlib.sha256(listed).hexdigest()}:
            return False
        rows = pq.read_table(io.BytesIO(listed), columns=["url", "sha256"]).to_pylist()
        digests = (hashlib.sha256((folder / row["url"]).read_bytes()) for row in rows)
        return all(d.hexdigest() == row["sha256"] for d, row in zip(digests, rows, strict=True))
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


def write(folder: Path, *, seed: int = 0, count: int = 1797, rehearsal: int = REHEARSAL) -> Path:
    """Write the dataset to `folder`, deterministically, and return the path of `urls.parquet`.

    The dataset has the first `count` of the 1,797 digits in the new style, and `rehearsal` pictures
    in the base's styles; a larger `count` adds rows and changes none. Columns: `url` (relative to
    the folder, "images/00001.png"), `caption`, `sha256` (hex, of the PNG's bytes). An intact folder
    of equal arguments is reused.

    Raises:
        FileExistsError: `folder` has files that this function did not write.
    """
    recipe = {"seed": seed, "count": count, "rehearsal": rehearsal, "version": 2}
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
        _fill(new, seed, count, rehearsal)
        digest = hashlib.sha256((new / LIST).read_bytes()).hexdigest()
        (new / NOTE).write_text(json.dumps(recipe | {"list": digest}, indent=2) + "\n")
        _replace(new, folder, recipe)
    return folder / LIST
