"""The file of LoRA adapters in diffusers' format."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from artifacts.records import parse_json
from artifacts.safetensors import Arrays, read_floats
from configs.settings.train_parts import Lora
from runtimes.adapters.initialise_lora import alpha
from runtimes.adapters.lora_target_layers import suffix_of
from runtimes.adapters.merge_lora import Adapter
from runtimes.contract import WrongInput

LORA_WEIGHTS = "pytorch_lora_weights.safetensors"  # diffusers' name
#: Header key of diffusers for the adapters' settings.
METADATA = "lora_adapter_metadata"
DOWN, UP, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
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
        WrongInput: the file is damaged, or its header lacks rank or alpha.
    """
    try:
        header, arrays = read_floats(path)
        settings = parse_json(header[METADATA])
        return _by_layer(arrays, settings)
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise WrongInput(f"{path} is no valid adapter file of Kilnworks: {error}") from None


def _by_layer(arrays: Arrays, settings: Mapping[str, Any]) -> Adapters:
    found: Adapters = {}
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
            found.setdefault(part, {})[layer] = adapter
    return found
