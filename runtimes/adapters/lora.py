"""Low-rank adapters apart from any framework: where they go, how they start, their file, merging.

An adapter of a layer with weight W (arXiv 2106.09685) is `down` [r, in] or [r, in, k, k] and `up`
[out, r] or [out, r, 1, 1]; the layer's weight becomes W + alpha / r * up @ down. With DoRA (arXiv
2402.09353) each output row of that sum is rescaled to a trained length, the `magnitude` [out].
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from artifacts.safetensors import Arrays, read_floats
from configs.training import Lora
from runtimes.contract import WrongInput
from runtimes.objective.random import Stream, generator

Float32 = NDArray[np.float32]
Layer = Literal["linear", "conv"]

LORA_WEIGHTS = "pytorch_lora_weights.safetensors"  # diffusers' name
#: Key of the file's header under which diffusers keeps the settings of adapters.
METADATA = "lora_adapter_metadata"
#: PEFT's name of our adapter, which State leaves out.
ADAPTER = "default"
DOWN, UP, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
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
        """The weight that does what the layer and its adapter do together."""
        rank, out = len(self.down), len(weight)
        delta = (self.up.reshape(out, rank) @ self.down.reshape(rank, -1)).reshape(weight.shape)
        total = weight + np.float32(self.scale) * delta
        if self.magnitude is None:
            return total
        rows = total.reshape(out, -1)
        factor = self.magnitude.reshape(out, 1) / np.linalg.norm(rows, axis=1, keepdims=True)
        return (rows * factor).reshape(weight.shape)


#: Part of the pipeline -> name of a layer in it -> its adapter.
Adapters = dict[str, dict[str, Adapter]]


def choose_layers(
    part: str, layers: Mapping[str, Layer], lora: Lora, attention: Sequence[str] = ()
) -> list[str]:
    """Names of the layers of a part that get an adapter.

    Args:
        part: unet, transformer, text_encoder, ...
        layers: every linear and convolution layer in it, by name.
        attention: ends of the names of attention's layers in the family's denoiser.

    Raises:
        WrongInput: the targets name none; the message names some that there are.
    """
    if part.startswith("text_encoder"):
        more = lora.target_modules in ("linear", "all")
        return _ending(layers, TEXT_LINEAR if more else TEXT_ATTENTION)
    if lora.target_modules == "all":
        return list(layers)
    if lora.target_modules == "linear":
        return [name for name, kind in layers.items() if kind == "linear"]
    chosen = _ending(
        layers, attention if lora.target_modules == "attention" else lora.target_modules
    )
    if not chosen:
        ends = sorted({_end(name) for name in layers})
        raise WrongInput(
            f"train.lora.target_modules: no layer of the {part} ends in "
            f"{', '.join(lora.target_modules)} (there are: {', '.join(ends[:12])}, ...)"
        )
    return chosen


def initial_down(seed: int, name: str, shape: Sequence[int]) -> Float32:
    """Where `down` starts, drawn by its name in State: the same on every runtime. `up` starts at 0.

    Uniform within 1 / sqrt(inputs), as PEFT starts it (Kaiming's rule with a = sqrt(5)).
    """
    counter = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    drawn = generator(seed, Stream.ADAPTERS, counter).random(tuple(shape), dtype=np.float32)
    bound = np.float32(1 / math.sqrt(math.prod(shape[1:])))
    return (2 * drawn - 1) * bound


def as_stored(arrays: Arrays) -> Arrays:
    """Adapters by State's names, by the names that a file has them under.

    They differ for the magnitudes of text encoders, which transformers finds as `.weight` alone,
    while diffusers writes them without.
    """
    return {
        f"{name}.weight" if name.startswith("text_") and name.endswith(MAGNITUDE) else name: array
        for name, array in arrays.items()
    }


def metadata(arrays: Mapping[str, Any], lora: Lora) -> dict[str, str]:
    """Header of a file of adapters named as in State, which diffusers takes their settings from."""
    described: dict[str, Any] = {}
    for name in sorted(arrays):
        if name.endswith(DOWN):
            part, _, layer = name.removesuffix(DOWN).partition(".")
            text = part.startswith("text_encoder")
            targets = described.setdefault(f"{part}.target_modules", [])
            # A text encoder's layers are named by their ends: transformers moved their beginnings.
            if (target := _end(layer) if text else layer) not in targets:
                targets.append(target)
            described[f"{part}.r"] = lora.rank
            described[f"{part}.lora_alpha"] = alpha(lora)
            described[f"{part}.use_dora"] = lora.dora
    return {METADATA: json.dumps(described, sort_keys=True)}


def alpha(lora: Lora) -> float:
    """The numerator of the adapters' scale."""
    return float(lora.rank if lora.alpha is None else lora.alpha)


def read_adapters(path: Path) -> Adapters:
    """Adapters from a file as `metadata` and State describe it, in any float precision.

    Raises:
        WrongInput: it is damaged, or says nothing of their scale.
    """
    try:
        header, arrays = read_floats(path)
        settings = json.loads(header[METADATA])
        return _by_layer(arrays, settings)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WrongInput(f"{path} holds no adapters as Kilnworks writes them: {error}") from None


def stored_name(part: str, name: str) -> str:
    """A weight's or layer's name in a part, as it is on the hub and in State.

    transformers 5 has left out the `text_model.` that CLIP's weights are stored under.
    """
    if not part.startswith("text_encoder") or name.startswith(("text_model.", "text_projection")):
        return name
    return f"text_model.{name}"


def state_name(part: str, name: str) -> str:
    """The name in State of a parameter of a part: the stored name, without PEFT's additions."""
    name = name.replace(f".lora_magnitude_vector.{ADAPTER}.weight", ".lora_magnitude_vector")
    return f"{part}.{stored_name(part, name.replace(f'.{ADAPTER}.', '.'))}"


def _by_layer(arrays: Arrays, settings: Mapping[str, Any]) -> Adapters:
    found: Adapters = {}
    for name in arrays:
        if name.endswith(DOWN):
            whole = name.removesuffix(DOWN)
            part, _, layer = whole.partition(".")
            scale = settings[f"{part}.lora_alpha"] / settings[f"{part}.r"]
            magnitude = None
            if settings[f"{part}.use_dora"]:
                ending = ".weight" if f"{whole}{MAGNITUDE}.weight" in arrays else ""
                magnitude = arrays[f"{whole}{MAGNITUDE}{ending}"]
            adapter = Adapter(arrays[name], arrays[whole + UP], magnitude, scale)
            found.setdefault(part, {})[layer] = adapter
    return found


def _ending(layers: Mapping[str, Layer], ends: Sequence[str]) -> list[str]:
    return [n for n in layers if any(n == end or n.endswith(f".{end}") for end in ends)]


def _end(layer: str) -> str:
    """The last words of a layer's name: to_q, to_out.0, net.2."""
    words = layer.split(".")
    return ".".join(words[-2:] if words[-1].isdigit() else words[-1:])
