"""LoRA adapters apart from any framework: layers, initial values, merging and file formats.

The adapter of a layer with weight W (arXiv 2106.09685) has `down` [r, in] or [r, in, k, k] and `up`
[out, r] or [out, r, 1, 1]; the effective weight is W + alpha / r * up @ down. DoRA (arXiv
2402.09353) rescales each output row of that sum to a trained norm, `magnitude` [out]. Initial
values are equal on every runtime. `train.lora.target_modules` selects the layers.

State, hub files and libraries name a weight differently. Files have diffusers' format, or that of
kohya's sd-scripts, which most inference programs load:

`<layer>.lora_down.weight`, `.lora_up.weight`, `.alpha` (a scalar) and, with DoRA, `.dora_scale`,
where <layer> is the prefix and the layer's name with underscores for dots. Prefixes: `lora_unet`
for every denoiser; `lora_te` for SD; `lora_te1` and `lora_te2` for others. Layers of SDXL's UNet
and of FLUX's transformer have the names from their authors' code (`input_blocks.4.1`, ...), those
of SD's UNet diffusers' names. A layer that the authors fuse has one adapter: the ranks add up.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from artifacts.records import parse_json
from artifacts.safetensors import Arrays, read_floats
from configs.errors import Refused
from configs.settings.train_parts import Lora
from runtimes.families.family import KohyaLayer, KohyaNames
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


LORA_WEIGHTS = "pytorch_lora_weights.safetensors"  # diffusers' name
#: Header key of diffusers for the adapters' settings.
METADATA = "lora_adapter_metadata"
DOWN = ".lora_A.weight"
UP = ".lora_B.weight"
MAGNITUDE = ".lora_magnitude_vector"
#: Pipeline component -> layer name -> adapter.
Adapters = dict[str, dict[str, Adapter]]
Array = TypeVar("Array")


def to_file_names(arrays: Arrays) -> Arrays:
    """Rename adapter arrays from State's names to the names in a file.

    Only magnitudes of text encoders differ: transformers requires the suffix `.weight`, which
    diffusers omits for the denoiser.
    """
    return {
        f"{name}.weight" if name.startswith("text_") and name.endswith(MAGNITUDE) else name: array
        for name, array in arrays.items()
    }


def to_state_names(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Rename adapter arrays from the names in a file to State's names."""
    suffix = f"{MAGNITUDE}.weight"
    return {
        name.removesuffix(".weight") if name.endswith(suffix) else name: array
        for name, array in arrays.items()
    }


def metadata(arrays: Mapping[str, Any], lora: Lora) -> dict[str, str]:
    """The header of an adapter file, from which diffusers reads rank, alpha and targets.

    Args:
        arrays: adapters with State's names.
    """
    described: dict[str, Any] = {}
    for name in sorted(arrays):
        if name.endswith(DOWN):
            part, _, layer = name.removesuffix(DOWN).partition(".")
            text = part.startswith("text_encoder")
            targets = described.setdefault(f"{part}.target_modules", [])
            # Suffixes only for text encoders: transformers 5 changed the prefixes of layer names.
            if (target := suffix_of(layer) if text else layer) not in targets:
                targets.append(target)
            described[f"{part}.r"] = lora.rank
            described[f"{part}.lora_alpha"] = alpha(lora)
            described[f"{part}.use_dora"] = lora.dora
            # Empty, but diffusers 0.34 to 0.41 fails without them.
            described |= {f"{part}.rank_pattern": {}, f"{part}.alpha_pattern": {}}
    return {METADATA: json.dumps(described, sort_keys=True)}


def with_alpha_in_weights(
    arrays: Mapping[str, Any], header: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Arrays and header of equal adapters, with `up` multiplied by alpha / r and alpha = r.

    Programs that do not read the header, such as ComfyUI, load this layout with a scale of 1.
    """
    settings = parse_json(header[METADATA])
    scaled = dict(arrays)
    for name, array in arrays.items():
        if name.endswith(UP):
            part, _, _ = name.partition(".")
            scaled[name] = array * (settings[f"{part}.lora_alpha"] / settings[f"{part}.r"])
    ranks = {name: rank for name, rank in settings.items() if name.endswith(".r")}
    settings |= {f"{n.removesuffix('r')}lora_alpha": float(rank) for n, rank in ranks.items()}
    return scaled, {**header, METADATA: json.dumps(settings, sort_keys=True)}


def read_adapters(path: Path) -> Adapters:
    """Read an adapter file of this project, in any floating-point precision, as float32.

    Raises:
        Refused: the file is damaged, or its header lacks rank or alpha.
    """
    try:
        header, arrays = read_floats(path)
        settings = parse_json(header[METADATA])
        return _by_layer(arrays, settings)
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise Refused(f"{path} is no valid adapter file of Kilnworks: {error}") from None


def _by_layer(arrays: Arrays, settings: Mapping[str, Any]) -> Adapters:
    adapters: Adapters = {}
    for name in arrays:
        if name.endswith(DOWN):
            prefix = name.removesuffix(DOWN)
            part, _, layer = prefix.partition(".")
            scale = settings[f"{part}.lora_alpha"] / settings[f"{part}.r"]
            if not math.isfinite(scale):
                raise ValueError(f"its scale is {scale}")
            magnitude = None
            if settings[f"{part}.use_dora"]:
                suffix = ".weight" if f"{prefix}{MAGNITUDE}.weight" in arrays else ""
                magnitude = arrays[f"{prefix}{MAGNITUDE}{suffix}"]
            adapter = Adapter(arrays[name], arrays[prefix + UP], magnitude, scale)
            adapters.setdefault(part, {})[layer] = adapter
    return adapters


LayerAdapter = tuple[KohyaLayer, Adapter]


def to_kohya(adapters: Adapters, names: KohyaNames, denoiser: Mapping[str, Any]) -> Arrays:
    """The arrays of a kohya file, by key.

    Args:
        adapters: component -> layer -> adapter.
        names: the family's names in sd-scripts.
        denoiser: the denoiser's config.

    Raises:
        ValueError: the format has no name for a layer, or the adapters of a fused layer cannot
            be combined.
    """
    layers: dict[str, list[LayerAdapter]] = {}
    for component, by_layer in adapters.items():
        text = names.text_prefixes.get(component)
        for layer, adapter in by_layer.items():
            place = names.place(layer, denoiser) if text is None else KohyaLayer(layer)
            if place is None:
                raise ValueError(f"{layer} has no name in the layout of {names.trainer}")
            key = f"{text or 'lora_unet'}_{place.layer.replace('.', '_')}"
            layers.setdefault(key, []).append((place, adapter))
    arrays: Arrays = {}
    for key, placed in layers.items():
        adapter = _fused(key, placed)
        arrays[f"{key}.lora_down.weight"] = adapter.down
        arrays[f"{key}.lora_up.weight"] = adapter.up
        arrays[f"{key}.alpha"] = np.array(adapter.scale * len(adapter.down), np.float32)
        if adapter.magnitude is not None:  # [out]: one norm per output
            shape = (-1, *[1] * (adapter.down.ndim - 1))
            arrays[f"{key}.dora_scale"] = adapter.magnitude.reshape(shape)
    return arrays


def kohya_header(
    adapters: Adapters,
    names: KohyaNames,
    denoiser: Mapping[str, Any],
    *,
    prediction_type: str,
    name: str,
) -> dict[str, str]:
    """The header of a kohya file, from which web UIs learn with which base to offer the adapters.

    Web UIs take a header without these fields for Stable Diffusion 1. Keys `ss_` come from the
    trainer, keys `modelspec.` from Stability AI's specification.

    Args:
        adapters, names, denoiser: as for `to_kohya`.
        prediction_type: prediction type of the scheduler that the adapters are used with.
        name: name of the adapters, for people.
    """
    base = names.base(denoiser, prediction_type)
    layer = next(iter(next(iter(adapters.values())).values()))
    rank = len(layer.down)
    return {
        "format": "pt",
        "modelspec.architecture": f"{base.architecture}/lora",
        "modelspec.implementation": base.implementation,
        "modelspec.title": name,
        "ss_base_model_version": base.version,
        "ss_network_alpha": str(layer.scale * rank),
        "ss_network_dim": str(rank),
        "ss_network_module": names.network_module,
        "ss_output_name": name,
        "ss_v2": str(base.version.startswith("sd_v2")),
    }


def _fused(key: str, placed: Sequence[LayerAdapter]) -> Adapter:
    """One adapter of the parts of a fused layer: `up` is block-diagonal, `down` stacked.

    Its rank is the sum of their ranks; its alpha grows by the same factor, which keeps the scale.
    """
    rows = placed[0][0].rows
    if rows is None:
        return placed[0][1]
    parts = sorted(placed, key=lambda part: part[0].first)
    adapters = [adapter for _, adapter in parts]
    up = np.zeros((rows, sum(len(adapter.down) for adapter in adapters)), np.float32)
    column = 0
    for place, adapter in parts:
        rank = len(adapter.down)
        up[place.first : place.first + len(adapter.up), column : column + rank] = adapter.up
        column += rank
    magnitudes = [adapter.magnitude for adapter in adapters if adapter.magnitude is not None]
    magnitude = np.concatenate(magnitudes) if magnitudes else None
    if magnitude is not None and len(magnitude) != rows:
        raise ValueError(f"{key} is one layer there, and DoRA adapts a part of it here")
    down = np.concatenate([adapter.down for adapter in adapters])
    return Adapter(down, up, magnitude, adapters[0].scale)
