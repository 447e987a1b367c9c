"""The initial values of LoRA adapters, equal on every runtime."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from configs.settings.train_parts import Lora
from runtimes.objective.counter_based_random import Stream, generator

Float32 = NDArray[np.float32]


def initial_down(seed: int, name: str, shape: Sequence[int]) -> Float32:
    """The initial `down` of an adapter, the same on every runtime. `up` starts at 0.

    Uniform in +-1 / sqrt(fan_in), as in PEFT (kaiming_uniform_ with a = sqrt(5)).

    Args:
        name: the array's name in State, which selects its random numbers.
        shape: [r, in] or [r, in, k, k].
    """
    counter = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    drawn = generator(seed, Stream.ADAPTERS, counter).random(tuple(shape), dtype=np.float32)
    bound = np.float32(1 / math.sqrt(math.prod(shape[1:])))
    return (2 * drawn - 1) * bound


def alpha(lora: Lora) -> float:
    """The alpha of the scale alpha / rank; it defaults to the rank."""
    return float(lora.rank if lora.alpha is None else lora.alpha)
