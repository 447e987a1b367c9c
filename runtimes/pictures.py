"""What the pictures of a GenerateJob start from, a batch at a time, for a pipeline to be called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtimes.extras import latent_channels
from runtimes.objective.draws import Stream, generator


@dataclass(frozen=True)
class Start:
    """One batch of pictures."""

    prompts: list[str]
    height: int  # pixels
    width: int
    noise: NDArray[np.float32]  # [N, C, h, w]
    #: Each picture's own, for schedulers that draw noise at every step.
    rngs: list[np.random.Generator]


def starts(
    prompts: Sequence[str], sampler: dict[str, Any], config: Any, scale: int, *, first: int
) -> Iterator[Start]:
    """Batches of `batch_size`; the first picture's noise is number `first`, whatever the batches.

    Args:
        sampler: as GenerateJob.sampler; a height or width of None is the model's own.
        config: the denoiser's.
        scale: pixels a side of a latent.
    """
    own = config.sample_size * scale
    height, width = (sampler.get(side) or own for side in ("height", "width"))
    shape = (latent_channels(config), height // scale, width // scale)
    size = sampler["batch_size"]
    for start in range(0, len(prompts), size):
        part = list(prompts[start : start + size])
        numbers = range(first + start, first + start + len(part))
        rngs = [generator(sampler["seed"], Stream.PICTURE, number) for number in numbers]
        noise = np.stack([rng.standard_normal(shape, dtype=np.float32) for rng in rngs])
        yield Start(part, height, width, noise, rngs)
