"""The caption that a sample is trained with: one of its own, or none (caption dropout)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from artifacts.latent_shards import LatentSample
from runtimes.objective.draw_noise_timesteps_and_captions import Choices


def caption_row(sample: LatentSample, choices: Choices) -> int:
    """The shard's row of the sample's caption; row 0 is the empty caption."""
    rows = sample.caption_rows or (0,)
    return 0 if choices.dropped else rows[int(choices.caption * len(rows))]


def zeroed(
    prompt: NDArray[np.uint16], pooled: NDArray[np.uint16] | None
) -> tuple[NDArray[np.uint16], NDArray[np.uint16] | None]:
    """Zeros instead of the empty caption's embeddings, as some pipelines of SDXL sample.

    Args:
        prompt: [T, D] bf16 bits.
        pooled: [P] bf16 bits.
    """
    return np.zeros_like(prompt), None if pooled is None else np.zeros_like(pooled)
