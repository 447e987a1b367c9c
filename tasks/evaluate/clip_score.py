"""CLIPScore and preference scores: the similarity of a picture and its prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


def clip_scores(images: NDArray[Any], texts: NDArray[Any]) -> Float64:
    """CLIPScore f64 [N]: 100 * max(cos, 0) of image features [N, D] and text features [N, D].

    Hessel et al. 2021 (arXiv 2104.08718), with w = 100 as in torchmetrics instead of 2.5.
    """
    return 100.0 * np.maximum(cosine(images, texts), 0.0)


def preference_scores(images: NDArray[Any], texts: NDArray[Any], logit_scale: float) -> Float64:
    """Preference f64 [N]: exp(logit_scale) * cos, as PickScore and HPSv2 compute it.

    Kirstain et al. 2023 (arXiv 2305.01569), Wu et al. 2023 (arXiv 2306.09341).
    """
    return float(np.exp(logit_scale)) * cosine(images, texts)


def cosine(x: NDArray[Any], y: NDArray[Any]) -> Float64:
    """The cosine of each row of x [N, D] with that of y [N, D]."""
    return np.asarray((normalise(x) * normalise(y)).sum(axis=1))


def normalise(features: NDArray[Any]) -> Float64:
    """Features f64 [N, D], scaled to unit length; rows of zeros stay."""
    wide = features.astype(np.float64)
    length = np.linalg.norm(wide, axis=1, keepdims=True)
    return np.asarray(wide / np.where(length > 0, length, 1.0), np.float64)
