"""A LoRA adapter in NumPy, and its merge into the layer's weight.

The adapter of a layer with weight W (arXiv 2106.09685) has `down` [r, in] or [r, in, k, k] and `up`
[out, r] or [out, r, 1, 1]; the effective weight is W + alpha / r * up @ down. DoRA (arXiv
2402.09353) rescales each output row of that sum to a trained norm, `magnitude` [out].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from runtimes.contract import WrongInput

Float32 = NDArray[np.float32]
Weight = TypeVar("Weight")


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
