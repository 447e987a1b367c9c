"""Images of a sampler as the bytes of their pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtimes.contract import ImagesNotFinite


def image_levels(images: NDArray[Any]) -> NDArray[np.uint8]:
    """Images [N, H, W, 3] in 0..1 as uint8.

    Raises:
        ImagesNotFinite: a pixel is NaN or infinite; as bytes, it would be black.
    """
    if not np.isfinite(images).all():
        raise ImagesNotFinite(
            "the model's pictures are not finite: a weight is not finite, or activations exceed "
            "the dtype of drawing (dtype, evaluate.dtype): choose bfloat16 or float32"
        )
    return np.asarray((images * 255).round().astype(np.uint8))
