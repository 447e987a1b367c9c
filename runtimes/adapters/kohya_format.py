"""The adapter format of kohya's sd-scripts, which most inference programs load.

`<layer>.lora_down.weight`, `.lora_up.weight`, `.alpha` (a scalar) and, with DoRA, `.dora_scale`,
where <layer> is the prefix and the layer's name with underscores for dots. Prefixes: `lora_unet`
for every denoiser; `lora_te` for SD; `lora_te1` and `lora_te2` for others. Layers of SDXL's UNet
and of FLUX's transformer have the names of their authors' code (`input_blocks.4.1`, ...), layers of
SD's have diffusers' names. A layer that the authors fuse has one adapter: the ranks add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from artifacts.safetensors import Arrays
from runtimes.adapters.lora_file_format import Adapters
from runtimes.adapters.merge_lora import Adapter
from runtimes.families.family import KohyaLayer, KohyaNames

LayerAdapter = tuple[KohyaLayer, Adapter]


def to_kohya(adapters: Adapters, names: KohyaNames, denoiser: Mapping[str, Any]) -> Arrays:
    """The arrays of a kohya file, by key.

    Args:
        adapters: component -> layer -> adapter.
        names: the family's names in sd-scripts.
        denoiser: the denoiser's config.

    Raises:
        ValueError: the format has no name for a layer, or the adapters of a fused layer cannot
            be one.
    """
    layers: dict[str, list[LayerAdapter]] = {}
    for component, found in adapters.items():
        text = names.text_prefixes.get(component)
        for layer, adapter in found.items():
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
    """The header of a kohya file, by which web UIs show adapters beside their base alone.

    A header without these fields is one of Stable Diffusion 1 to them. Keys `ss_` are those of the
    trainer, keys `modelspec.` those of Stability AI's specification.

    Args:
        adapters, names, denoiser: as for `to_kohya`.
        prediction_type: of the scheduler that the adapters are used with.
        name: of the adapters, for people.
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

    Its rank is the sum of theirs, and its alpha grows alike, so that the scale stays.
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
