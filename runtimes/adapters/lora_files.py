"""Files of LoRA adapters: diffusers' format, and that of kohya's sd-scripts.

A drawing's trained components are loaded with their adapters merged.

Most inference programs load kohya's format: `<layer>.lora_down.weight`, `.lora_up.weight`, `.alpha`
(a scalar) and, with DoRA, `.dora_scale`, where <layer> is the prefix and the layer's name with
underscores for dots. Prefixes: `lora_unet` for every denoiser; `lora_te` for SD; `lora_te1` and
`lora_te2` for others. Layers of SDXL's UNet and of FLUX's transformer have the names from their
authors' code (`input_blocks.4.1`, ...), those of SD's UNet diffusers' names. A layer that the
authors fuse has one adapter: the ranks add up.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from fsspec.core import url_to_fs

from artifacts.records import parse_json
from artifacts.safetensors import Arrays, read_arrays, read_floats
from configs.errors import Refused
from configs.settings.train_parts import Lora
from runtimes.adapters.lora import Adapter, alpha, suffix_of
from runtimes.families.family import KohyaLayer, KohyaNames
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import Drawing

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
        adapters: Adapters = {}
        for name in arrays:
            if not name.endswith(DOWN):
                continue
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
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise Refused(f"{path} is no valid adapter file of Kilnworks: {error}") from None


def read_scaled(url: str) -> Adapters:
    """The adapters of a file with State's names, whose scale is 1, as float32.

    Raises:
        OSError, ValueError: the file is missing, damaged or cannot be reached.
    """
    fs, path = url_to_fs(url)
    arrays = to_state_names(read_arrays(fs, path))
    adapters: Adapters = {}
    for name in arrays:
        if name.endswith(DOWN):
            prefix = name.removesuffix(DOWN)
            part, _, layer = prefix.partition(".")
            magnitude = arrays.get(prefix + MAGNITUDE)
            rows = None if magnitude is None else magnitude[...]
            adapter = Adapter(arrays[name][...], arrays[prefix + UP][...], rows, 1.0)
            adapters.setdefault(part, {})[layer] = adapter
    return adapters


#: Loads one component: (name, folder, adapters to merge by layer name) -> model.
Load = Callable[[str, Path, Mapping[str, Any]], Any]


def load_trained_components(
    drawing: Drawing, base: Base, load: Load, without: Container[str] = ()
) -> dict[str, Any]:
    """Load the denoiser of a drawing and the text encoders that were trained with it.

    Args:
        drawing: folders of trained components, and the LoRA file, if any.
        base: the pipeline, which supplies every untrained component.
        load: loads one component and merges its adapters.
        without: components that are not loaded.

    Returns:
        Component name, such as `unet` or `text_encoder`, to model.

    Raises:
        Refused: the adapters were trained for another architecture.
    """
    family = base.family
    adapters = {} if drawing.lora is None else read_adapters(Path(drawing.lora))
    known = (family.denoiser, *family.clip_encoders)
    if strange := adapters.keys() - set(known):
        raise Refused(f"{drawing.lora} is for another model: it has adapters of {min(strange)}")
    return {
        name: load(name, Path(drawing.parts.get(name, base.part(name))), adapters.get(name, {}))
        for name in known
        if name == family.denoiser or name in adapters.keys() | drawing.parts.keys()
        if name not in without
    }


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
