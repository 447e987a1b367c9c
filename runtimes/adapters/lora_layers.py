"""LoRA adapters in NumPy: target layers, initialisation and merging.

The adapter of a layer with weight W (arXiv 2106.09685) has `down` [r, in] or [r, in, k, k] and `up`
[out, r] or [out, r, 1, 1]; the effective weight is W + alpha / r * up @ down. DoRA (arXiv
2402.09353) rescales each output row of that sum to a trained norm, `magnitude` [out].
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from configs.lora import Lora
from runtimes.contract import WrongInput
from runtimes.objective.counter_based_random import Stream, generator

Float32 = NDArray[np.float32]
Layer = Literal["linear", "conv"]
Weight = TypeVar("Weight")

#: PEFT's name of the adapter; names in State omit it.
ADAPTER = "default"
TEXT_ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj")
TEXT_LINEAR = (*TEXT_ATTENTION, "fc1", "fc2")


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


def choose_layers(
    part: str, layers: Mapping[str, Layer], lora: Lora, attention: Sequence[str] = ()
) -> list[str]:
    """Names of the layers of a component that have an adapter.

    Args:
        part: the component: unet, transformer, text_encoder, ...
        layers: all linear and convolution layers of the component, by name.
        attention: name suffixes of the attention layers in the family's denoiser.

    Raises:
        WrongInput: no layer matches the targets; the message lists available names.
    """
    if part.startswith("text_encoder"):
        all_linear = lora.target_modules in ("linear", "all")
        return _with_suffix(layers, TEXT_LINEAR if all_linear else TEXT_ATTENTION)
    if lora.target_modules == "all":
        return list(layers)
    if lora.target_modules == "linear":
        return [name for name, kind in layers.items() if kind == "linear"]
    chosen = _with_suffix(
        layers, attention if lora.target_modules == "attention" else lora.target_modules
    )
    if not chosen:
        suffixes = sorted({suffix_of(name) for name in layers})
        raise WrongInput(
            f"train.lora.target_modules: no layer of the {part} ends in "
            f"{', '.join(lora.target_modules)} (there are: {', '.join(suffixes[:12])}, ...)"
        )
    return chosen


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


def check_unambiguous(part: str, chosen: Sequence[str], adapted: Collection[str]) -> None:
    """Raise WrongInput if PEFT, which matches a target as the suffix of names, adapted others."""
    if odd := set(adapted) ^ set(chosen):
        raise WrongInput(
            f"train.lora.target_modules: {min(odd)} of the {part} is ambiguous: the name of one "
            "layer ends with the name of another"
        )


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


def _with_suffix(layers: Mapping[str, Layer], suffixes: Sequence[str]) -> list[str]:
    return [n for n in layers if any(n == s or n.endswith(f".{s}") for s in suffixes)]


def suffix_of(layer: str) -> str:
    """The last component of a layer's name, with an index: to_q, to_out.0, net.2."""
    words = layer.split(".")
    return ".".join(words[-2:] if words[-1].isdigit() else words[-1:])
