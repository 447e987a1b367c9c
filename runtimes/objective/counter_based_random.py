"""Counter-based random numbers: any step can be drawn without drawing the ones before it.

NumPy's Philox 4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The
key is (seed, stream). Words 1 to 3 of the counter hold our counters; NumPy advances word 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum, unique
from typing import Any

import numpy as np


@unique
class Stream(IntEnum):
    """Independent random streams, one per purpose; parentheses name the counters."""

    POSTERIOR = 1  # (sample) the VAE posterior
    NOISE = 2  # (sample) the diffusion noise
    NOISE_OFFSET = 3  # (sample) its per-channel shift
    CHOICES = 4  # (sample) timestep, caption, dropout, flip, mask: uniforms, in this order
    BATCHES = 5  # (epoch) the order of buckets
    SHARDS = 6  # (epoch) the order of shards, the same for all buckets
    WINDOW = 7  # (epoch, bucket, window) the order of samples
    PICTURE = 8  # (image) the initial noise of sampling
    INPUT_PERTURBATION = 9  # (sample) the perturbation of the input noise
    ADAPTERS = 20  # (digest of an adapter's name) its initial weights
    DROPOUT = 21  # (step, first sample of the micro-batch, rank) the dropout seed
    SCORE = 22  # () the initial weights of the aesthetic-score embedding


def generator(seed: int, stream: Stream, *counter: int) -> np.random.Generator:
    """A generator for one stream at up to three counters, each below 2**64."""
    words = np.zeros(4, np.uint64)
    words[1 : 1 + len(counter)] = counter
    key = np.array([seed, stream], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=words))


def generators(seed: int, stream: Stream, counters: Iterable[int]) -> Iterator[np.random.Generator]:
    """Yield `generator(seed, stream, counter)` for each counter, about ten times faster.

    All are one object with a new state: a generator is valid until the next one is yielded.
    """
    rng = generator(seed, stream)
    state: Any = rng.bit_generator.state
    for counter in counters:
        state["state"]["counter"][1] = counter
        rng.bit_generator.state = state
        yield rng
