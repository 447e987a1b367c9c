"""Copies of held-out pictures that training would see: `python -m bench.near_duplicates`.

Copies are planted in tiles of photographs and searched by Kilnworks, and by imagededup's PHash with
its own limit of 10 bits. Tiles do not overlap, so all other pictures are unlike. The package
scikit-image has the photographs; imagededup is left out if it is not installed.
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from artifacts.records import digest_bytes
from bench.report import Meter, Row, finish, option_parser
from demo import dataset
from tasks.encode.crop_to_bucket import decode, is_holdout
from tasks.encode.near_duplicates import mirror_parts, near_any, thumbnail

PHOTOGRAPHS = (
    *("astronaut", "brick", "camera", "chelsea", "coffee", "coins", "grass", "gravel", "ihc"),
    *("hubble_deep_field", "moon", "motorcycle_left", "retina", "rocket"),
)
ORIGINALS = 200
HOLDOUT = 0.15
PHASH_BITS = 10
Bits = NDArray[np.uint64]
Near = Callable[[Sequence[Image.Image], Sequence[Image.Image]], NDArray[np.bool_]]


def jpeg(image: Image.Image, quality: int = 60) -> Image.Image:
    """The picture, saved again as a JPEG."""
    stream = io.BytesIO()
    image.save(stream, "jpeg", quality=quality)
    return Image.open(stream).convert("RGB")


def cropped(image: Image.Image, share: float) -> Image.Image:
    """The picture without `share` of its sides at each edge, as a JPEG."""
    edge = round(image.width * share)
    return jpeg(ImageOps.crop(image, edge), 90)


COPIES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "jpeg": jpeg,
    "resized": lambda image: jpeg(image.resize((image.width // 2, image.height // 2)), 90),
    "mirrored": lambda image: jpeg(ImageOps.mirror(image), 90),
    "cropped_2": lambda image: cropped(image, 0.02),
    "cropped_5": lambda image: cropped(image, 0.05),
}


def tiles(side: int) -> list[Image.Image]:
    """Square parts of the photographs, `side` pixels wide, without flat ones."""
    import skimage

    found = []
    for path in sorted(Path(skimage.__file__).parent.glob("data/*.*g")):
        if path.stem in PHOTOGRAPHS:
            image = Image.open(path).convert("RGB")
            for top in range(0, image.height - side + 1, side):
                for left in range(0, image.width - side + 1, side):
                    found.append(image.crop((left, top, left + side, top + side)))
    return [tile for tile in found if np.std(np.asarray(tile.convert("L"))) >= 5]


def digits() -> list[Image.Image]:
    """The pictures of the demo."""
    with tempfile.TemporaryDirectory(prefix="kiln-bench-") as folder:
        dataset.write(Path(folder))
        return [Image.open(path).convert("RGB") for path in sorted(Path(folder).glob("*/*.png"))]


def ours(some: Sequence[Image.Image], others: Sequence[Image.Image]) -> NDArray[np.bool_]:
    """Whether each of some pictures is near one of the others."""
    parts = mirror_parts(np.stack([thumbnail(image) for image in others]))
    return near_any(np.stack([thumbnail(image) for image in some]), parts)


def by_imagededup() -> Near:
    """The same by imagededup's PHash, within its default distance."""
    from imagededup.methods import PHash

    hasher = PHash(verbose=False)

    def hashes(images: Sequence[Image.Image]) -> Bits:
        found = [hasher.encode_image(image_array=np.asarray(image)) for image in images]
        return np.array([int(code, 16) for code in found], np.uint64)

    def near(some: Sequence[Image.Image], others: Sequence[Image.Image]) -> NDArray[np.bool_]:
        apart = np.bitwise_count(hashes(some)[:, None] ^ hashes(others)[None])
        return np.asarray((apart <= PHASH_BITS).any(axis=1))

    return near


def side_of(image: Image.Image) -> bool:
    """Whether the split holds a picture out; tiles have no download, so their pixels select it."""
    return is_holdout(bytes.fromhex(digest_bytes(image.tobytes())), HOLDOUT)


def planted(near: Near, originals: Sequence[Image.Image]) -> dict[str, Any]:
    """Of each kind of copy: the share found, and those trained on, of copies of held-out ones."""
    figures: dict[str, Any] = {}
    for kind, make in COPIES.items():
        copies = [make(image) for image in originals]
        found = [near([copies[n]], [image])[0] for n, image in enumerate(originals)]
        leaks = [
            not found[number]
            for number, image in enumerate(originals)
            if side_of(image) and not side_of(copies[number])
        ]
        figures[f"{kind}_found"] = round(float(np.mean(found)), 3)
        figures[f"{kind}_trained_on"] = f"{sum(leaks)} of {len(leaks)}"
    return figures


def left_out(near: Near, images: Sequence[Image.Image]) -> float:
    """The share of unlike training pictures that is left out."""
    held_out = [image for image in images if side_of(image)]
    training = [image for image in images if not side_of(image)]
    return round(float(near(training, held_out).mean()), 4)


def costs() -> dict[str, float]:
    """CPU milliseconds per picture of 1024 x 1024, and the time to compare 50 M with 100,000."""
    stream = io.BytesIO()
    tiles(128)[0].resize((1024, 1024)).save(stream, "jpeg", quality=95)
    data = stream.getvalue()
    count = 30
    meter = Meter()
    images = [decode(data, 2**26) for _ in range(count)]
    decoding = meter.elapsed()[1] / count
    meter = Meter()
    grey = np.stack([thumbnail(image) for image in images])
    thumbnails = meter.elapsed()[1] / count
    some = np.random.default_rng(0).integers(0, 256, (20_000, *grey.shape[1:]), np.uint8)
    others = mirror_parts(some[:10_000])
    meter = Meter()
    near_any(some, others)
    seconds, cpu = meter.elapsed()
    pairs = len(some) * others.shape[1]
    return {
        "decode_ms": round(1000 * decoding, 2),
        "thumbnail_ms": round(1000 * thumbnails, 2),
        "thumbnail_over_decode": round(thumbnails / decoding, 3),
        "pairs_per_cpu_second": round(pairs / cpu),
        "pairs_per_second": round(pairs / seconds),
        "cpu_hours_of_50M_x_100k": round(5e12 / (pairs / cpu) / 3600, 1),
    }


def main(arguments: Sequence[str]) -> int:
    """Measure both sides."""
    options = option_parser("near_duplicates", __doc__).parse_args(arguments)
    try:
        photographs = tiles(128)
    except ImportError as error:
        return finish("near_duplicates", [Row("kilnworks", skipped=str(error))], options)
    chosen = np.random.default_rng(0).choice(len(photographs), ORIGINALS, replace=False)
    originals = [photographs[number] for number in chosen]
    unlike = {"tiles_64": tiles(64), "tiles_96": tiles(96), "digits": digits()}
    rows = []
    for name, make in (("kilnworks", lambda: ours), ("imagededup_phash", by_imagededup)):
        try:
            near = make()
        except ImportError as error:
            rows.append(Row(name, skipped=str(error)))
            continue
        figures = planted(near, originals)
        for group, images in unlike.items():
            figures[f"left_out_of_{len(images)}_{group}"] = left_out(near, images)
        rows.append(Row(name, figures=figures))
    rows.append(Row("cost", figures=costs()))
    return finish("near_duplicates", rows, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
