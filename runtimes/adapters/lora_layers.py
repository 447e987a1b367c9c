"""LoRA adapters in NumPy: initialisation, merging, and names of their arrays.

The adapter of a layer with weight W (arXiv 2106.09685) has `down` [r, in] or [r, in, k, k] and `up`
[out, r] or [out, r, 1, 1]; the effective weight is W + alpha / r * up @ down. DoRA (arXiv
2402.09353) rescales each output row of that sum to a trained norm, `magnitude` [out].
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from configs.lora import Lora
from runtimes.contract import WrongInput
from runtimes.objective.counter_based_random import Stream, generator

Float32 = NDArray[np.float32]
Weight = TypeVar("Weight")

#: PEFT's name of the adapter; names in State omit it.
ADAPTER = "default"


@dataclass(frozen=True)
class Adapter:
    """The adapter of one layer."""

    down: Float32
    up: Float32
    magnitude: Float32 | None
    scale: float  # alpha / rank

    def merged(self, weight: Float32) -> Float32:
        """The layer's weight with the adapter merged, in the shape of `weight`."""
        rank, out = len(self.down), len(weight)
        delta = (self.up.reshape(out, rank) @ self.down.reshape(rank, -1)).reshape(weight.shape)
        total = weight + np.float32(self.scale) * delta
        if self.magnitude is None:
            return total
        rows = total.reshape(out, -1)
        factor = self.magnitude.reshape(out, 1) / np.linalg.norm(rows, axis=1, keepdims=True)
        return (rows * factor).reshape(weight.shape)


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


def merged_weights(
    part: str,
    adapters: Mapping[str, Adapter],
    weights: Mapping[str, Weight],
    to_numpy: Callable[[Weight], Float32],
) -> Iterator[tuple[str, Float32]]:
    """Yield the name and the merged weight of each adapted layer.

    Args:
        part: component name, such as `unet`, for messages.
        adapters: stored layer name to adapter.
        weights: stored layer name to weight of any library.
        to_numpy: converts a weight to float32.

    Raises:
        WrongInput: the component lacks an adapted layer, or the layer has another shape.
    """
    for name, adapter in adapters.items():
        if name not in weights:
            raise WrongInput(f"the adapters are for another model: the {part} here has no {name}")
        try:
            merged = adapter.merged(to_numpy(weights[name]))
        except ValueError:
            raise WrongInput(f"the adapters are for another model: {name} differs") from None
        yield name, merged


def stored_name(part: str, name: str) -> str:
    """The name of a weight or layer of a component, as in hub files and in State.

    transformers 5 drops the prefix `text_model.` of CLIP's weights; files keep it.
    """
    if not part.startswith("text_encoder") or name.startswith(("text_model.", "text_projection")):
        return name
    return f"text_model.{name}"


def state_name(part: str, name: str) -> str:
    """A parameter's name in State: component and stored name, without PEFT's adapter name."""
    name = name.replace(f".lora_magnitude_vector.{ADAPTER}.weight", ".lora_magnitude_vector")
    return f"{part}.{stored_name(part, name.replace(f'.{ADAPTER}.', '.'))}"
