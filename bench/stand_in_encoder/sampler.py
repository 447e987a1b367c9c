"""The stand-in for encoders."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtimes.process.job import EncodeJob

FACTOR = 8
TOKENS = 77
WIDTH = 64


class StandIn:
    """Implements contract.PipelineEncoder.

    Args:
        seconds: per batch of images.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.info: dict[str, Any] = {
            "size_step": FACTOR,
            "family": "sdxl",
            "vae_scale_factor": FACTOR,
            "caption_tokens": TOKENS,
        }
        self.limits = {"text_encoder": TOKENS}

    def images(self, pixels: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[Any]]:
        time.sleep(self.seconds)
        moments = np.zeros((len(pixels), 4, *(side // FACTOR for side in pixels.shape[2:])), "f4")
        return moments, moments

    def texts(self, captions: Sequence[str]) -> tuple[NDArray[Any], NDArray[Any] | None]:
        return np.zeros((len(captions), TOKENS, WIDTH), np.float32), None

    def input_ids(self, captions: Sequence[str]) -> NDArray[np.int64]:
        return np.zeros((len(captions), 1, TOKENS), np.int64)

    def token_counts(self, captions: Sequence[str]) -> dict[str, list[int]]:
        return {"text_encoder": [len(caption.split()) for caption in captions]}


def open_encoder(job: EncodeJob) -> StandIn:
    """The stand-in of a job whose `model` is the number of seconds per batch."""
    return StandIn(float(job.model))
