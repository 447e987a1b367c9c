"""LoRA adapters apart from any framework: layers, initial values and merging.

The adapter of a layer with weight W (arXiv 2106.09685) has `down` [r, in] or [r, in, k, k] and `up`
[out, r] or [out, r, 1, 1]; the effective weight is W + alpha / r * up @ down. DoRA (arXiv
2402.09353) rescales each output row of that sum to a trained norm, `magnitude` [out]. Initial
values are equal on every runtime. `train.lora.target_modules` selects the layers.

State, hub files and libraries name a weight differently; lora_files.py has the file formats.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from configs.errors import Refused
from configs.settings.train_parts import Lora
from runtimes.objective.random_draws import Stream, generator

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


Layer = Literal["linear", "conv"]
KINDS: dict[int, Layer] = {2: "linear", 4: "conv"}  # by the rank of the weight

TEXT_ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj")
TEXT_LINEAR = (*TEXT_ATTENTION, "fc1", "fc2")


def layers_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Layer]:
    """The linear and convolution layers of a component, given the shapes of its weights."""
    return {
        name.removesuffix(".weight"): KINDS[len(shape)]
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) in KINDS
    }


def choose_layers(
    part: str, layers: Mapping[str, Layer], lora: Lora, attention: Sequence[str] = ()
) -> list[str]:
    """Names of the layers of a component that have an adapter.

    Args:
        part: the component: unet, transformer, text_encoder, ...
        layers: all linear and convolution layers of the component, by name.
        attention: name suffixes of the attention layers in the family's denoiser.

    Raises:
        Refused: no layer matches the targets; the message lists available names.
    """
    if part.startswith("text_encoder"):
        all_linear = lora.target_modules in ("linear", "all")
        return _with_suffix(layers, TEXT_LINEAR if all_linear else TEXT_ATTENTION)
    if lora.target_modules == "all":
        return list(layers)
    if lora.target_modules == "linear":
        return [name for name, kind in layers.items() if kind == "linear"]
    wanted = attention if lora.target_modules == "attention" else lora.target_modules
    chosen = _with_suffix(layers, wanted)
    if not chosen:
        suffixes = sorted({suffix_of(name) for name in layers})
        raise Refused(
            f"train.lora.target_modules: no layer of the {part} ends in "
            f"{', '.join(wanted)} (there are: {', '.join(suffixes[:12])}, ...)"
        )
    return chosen


def check_unambiguous(part: str, chosen: Sequence[str], adapted: Collection[str]) -> None:
    """Raise Refused if PEFT, which matches a target as the suffix of names, adapted others."""
    if odd := set(adapted) ^ set(chosen):
        raise Refused(
            f"train.lora.target_modules: {min(odd)} of the {part} is ambiguous: the name of one "
            "layer ends with the name of another"
        )


def _with_suffix(layers: Mapping[str, Layer], suffixes: Sequence[str]) -> list[str]:
    return [n for n in layers if any(n == s or n.endswith(f".{s}") for s in suffixes)]


def suffix_of(layer: str) -> str:
    """The last component of a layer's name, with an index: to_q, to_out.0, net.2."""
    words = layer.split(".")
    return ".".join(words[-2:] if words[-1].isdigit() else words[-1:])


Weight = TypeVar("Weight")


@dataclass(frozen=True)
class Adapter:
    """The adapter of one layer."""

    down: Float32
    up: Float32
    magnitude: Float32 | None
    scale: float  # alpha / rank

    def rows(self, index: Any) -> Adapter:
        """The adapter of some of the layer's outputs."""
        magnitude = None if self.magnitude is None else self.magnitude[index]
        return replace(self, up=self.up[index], magnitude=magnitude)

    def merged(self, weight: Float32) -> Float32:
        """The layer's weight with the adapter merged, in the shape of `weight`."""
        rank = len(self.down)
        out = len(weight)
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
        Refused: the component lacks an adapted layer, or the layer has another shape.
    """
    for name, adapter in adapters.items():
        if name not in weights:
            raise Refused(f"the adapters are for another model: the {part} here has no {name}")
        try:
            merged = adapter.merged(to_numpy(weights[name]))
        except ValueError:
            raise Refused(f"the adapters are for another model: {name} differs") from None
        yield name, merged


#: PEFT's name of the adapter; names in State omit it.
ADAPTER = "default"


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
