"""Reference pictures of edit models: their sizes and pixels, the same in training and drawing.

A reference keeps its aspect ratio. It is reduced to an area if it is larger, and its sides are
rounded down, so that a set of references has few sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

import fsspec
import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

from configs.errors import Refused
from runtimes.process.job import GenerateJob

#: The first of EXIF's orientations in which width and height are exchanged.
SIDEWAYS = 5


@dataclass(frozen=True)
class ReferenceLimits:
    """The sizes of references."""

    pixels: int = 1024 * 1024  # largest area
    step: int = 64  # pixels; the divisor of both sides

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) of a prepared reference, by those of the picture; at least one step."""
        scale = min(1.0, math.sqrt(self.pixels / (height * width)))
        rows, columns = (int(side * scale) // self.step for side in (height, width))
        return max(rows, 1) * self.step, max(columns, 1) * self.step

    def prepare(self, image: Image.Image) -> NDArray[np.float32]:
        """Pixels [3, H, W] f32 in -1..1 of an upright RGB picture.

        It is resized (Lanczos) to cover its size, as targets are, and cropped around its centre.
        """
        height, width = self.size_of(image.height, image.width)
        scale = max(height / image.height, width / image.width)
        covering = (
            max(width, round(image.width * scale)),
            max(height, round(image.height * scale)),
        )
        if covering != image.size:
            image = image.resize(covering, Image.Resampling.LANCZOS)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        return to_pixels(image.crop((left, top, left + width, top + height)))

    def read(self, path: str | Path) -> NDArray[np.float32]:
        """Pixels [3, H, W] f32 in -1..1 of a file or URL. Raises Refused if it is no picture."""
        return self.prepare(read_picture(path))


def read_picture(path: str | Path) -> Image.Image:
    """The upright RGB picture of a file. Raises Refused if it is no picture."""
    with _opened(path) as image:
        return to_rgb(ImageOps.exif_transpose(image))


def _upright_size(path: str | Path) -> tuple[int, int]:
    """(height, width) of `read_picture`, from the file's header."""
    with _opened(path) as image:
        is_turned = image.getexif().get(ExifTags.Base.Orientation, 1) >= SIDEWAYS
        return (image.width, image.height) if is_turned else (image.height, image.width)


@contextmanager
def _opened(path: str | Path) -> Iterator[Image.Image]:
    try:
        with fsspec.open(str(path), "rb") as stream, Image.open(stream) as image:
            yield image
    except FileNotFoundError:
        raise Refused(f"reference {path} does not exist") from None
    except Exception as error:  # Pillow's decoders raise many unrelated types on damaged data
        raise Refused(f"reference {path} cannot be read as a picture: {error}") from None


def drawn_batches(job: GenerateJob) -> list[range]:
    """Numbers of a job's pictures, batch by batch; references in a batch have the same sizes.

    Raises:
        Refused: a reference is no picture.
    """
    limits = ReferenceLimits(job.reference_pixels, job.reference_step)

    @cache
    def size(path: str) -> tuple[int, int]:
        return limits.size_of(*_upright_size(path))

    shapes = [tuple(map(size, paths)) for paths in job.references or [()] * len(job.prompts)]
    batches = list[range]()
    for _, run in groupby(range(len(shapes)), key=shapes.__getitem__):
        first, *more = run
        end = first + len(more) + 1
        starts = range(first, end, job.sampler["batch_size"])
        batches += (range(start, min(start + starts.step, end)) for start in starts)
    return batches


def to_rgb(image: Image.Image) -> Image.Image:
    """The picture with 8 bits per channel, transparent parts over white."""
    if image.mode.startswith("I;16"):  # Pillow would clip 16-bit grey at 255, not scale it
        grey = np.asarray(image, np.uint16) / 257.0
        return Image.fromarray(grey.round().astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def to_pixels(image: Image.Image) -> NDArray[np.float32]:
    """A VAE's input [3, H, W] f32 in -1..1 of an RGB picture."""
    pixels = np.asarray(image, np.float32).transpose(2, 0, 1) / 255.0 * 2.0 - 1.0
    return np.ascontiguousarray(pixels)
