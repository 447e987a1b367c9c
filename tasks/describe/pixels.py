"""Describers of pixels alone: perceptual hashes with thumbnails, and quality."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image
from scipy.fft import dctn
from scipy.ndimage import laplace

from tasks.describe.describers import Describer, Picture, Spec
from tasks.encode.near_duplicates import SIDE

#: Sides in pixels of the picture whose DCT is taken, and of the low frequencies that are kept.
HASHED_SIDE = 32
LOW = 8
#: Side of the picture whose quality is measured, in pixels.
QUALITY_SIDE = 256


class Hash(Describer):
    """The 64-bit pHash of a picture and of its mirror image, and its thumbnail.

    A bit is whether a low frequency of the DCT exceeds their median, as in imagehash.phash
    (Zauner 2010, "Implementation and benchmarking of perceptual image hash functions").
    """

    version = 2

    @classmethod
    def values(cls, spec: Spec) -> dict[str, pa.DataType]:
        return {"phash": pa.uint64(), "mirrored": pa.uint64(), "thumbnail": pa.binary(SIDE * SIDE)}

    def prepare(self, source: Picture) -> tuple[int, int, bytes]:
        size = (HASHED_SIDE, HASHED_SIDE)
        # A small picture is converted to grey in a fraction of the time.
        small = source.image.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0).convert("L")
        low = dctn(np.asarray(small, np.float64))[:LOW, :LOW]
        # The DCT of a mirror image has the odd horizontal frequencies negated.
        mirrored = low * (-1.0) ** np.arange(LOW)
        return _bits(low), _bits(mirrored), small.reduce(HASHED_SIDE // SIDE).tobytes()

    def describe(self, prepared: Sequence[Any]) -> Sequence[tuple[Any, ...]]:
        return prepared


def _bits(low: NDArray[np.float64]) -> int:
    """The hash of the frequencies [8, 8]; the mean's bit is the highest."""
    half = LOW * LOW // 2
    below, above = np.partition(low.ravel(), (half - 1, half))[half - 1 : half + 1]
    median = (below + above) / 2  # np.median takes three times as long
    return int.from_bytes(np.packbits(low > median).tobytes(), "big")


class Quality(Describer):
    """Sharpness, brightness and contrast of the grey picture, resized to 256 x 256.

    sharpness: variance of the Laplacian of grey values 0 to 255 (Pech-Pacheco et al. 2000);
    brightness and contrast: mean and standard deviation of grey values 0 to 1.
    """

    @classmethod
    def values(cls, spec: Spec) -> dict[str, pa.DataType]:
        return dict.fromkeys(("sharpness", "brightness", "contrast"), pa.float32())

    def prepare(self, source: Picture) -> tuple[float, float, float]:
        size = (QUALITY_SIDE, QUALITY_SIDE)
        resized = source.image.convert("L").resize(size, Image.Resampling.BILINEAR)
        grey = np.asarray(resized, np.float32)
        return float(laplace(grey).var()), float(grey.mean() / 255), float(grey.std() / 255)

    def describe(self, prepared: Sequence[Any]) -> Sequence[tuple[Any, ...]]:
        return prepared
