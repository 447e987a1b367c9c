"""Random numbers that depend on (seed, stream, counter) alone, so that any step can be drawn first.

Philox 4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), as NumPy has
it: key = (seed, stream), and the block counter's upper words are ours, the lowest counts the draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum, unique
from typing import Any

import numpy as np


@unique
class Stream(IntEnum):
    """What a number is drawn for. Streams share nothing: turning one off moves no other."""

    POSTERIOR = 1  # (sample) the VAE posterior
    NOISE = 2  # (sample) the diffusion noise
    NOISE_OFFSET = 3  # (sample) its per-channel shift
    CHOICES = 4  # (sample) timestep, caption, dropout, flip, mask: uniforms, in this order
    BATCHES = 5  # (epoch) the order of buckets
    SHARDS = 6  # (epoch, bucket) the order of shards
    WINDOW = 7  # (epoch, bucket, window) the order of samples
    PICTURE = 8  # (picture) the start noise of sampling
    INPUT_PERTURBATION = 9  # (sample) noise on the noise given to the model
    ADAPTERS = 20  # (an adapter's name, as a number) where it starts
    DROPOUT = 21  # (step, first sample of the micro batch, rank) a seed of dropout
    SCORE = 22  # () where the layers that take an aesthetic score start


def generator(seed: int, stream: Stream, *counter: int) -> np.random.Generator:
    """The numbers of one stream at up to three counters, each below 2**64."""
    words = np.zeros(4, np.uint64)
    words[1 : 1 + len(counter)] = counter
    key = np.array([seed, stream], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=words))


def generators(seed: int, stream: Stream, counters: Iterable[int]) -> Iterator[np.random.Generator]:
    """`generator(seed, stream, counter)` for one counter after another, in a tenth of the time.

    Each is the one before, set anew: it is good until the next is asked for.
    """
    rng = generator(seed, stream)
    state: Any = rng.bit_generator.state
    for counter in counters:
        state["state"]["counter"][1] = counter
        rng.bit_generator.state = state
        yield rng
