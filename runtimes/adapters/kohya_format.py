"""The adapter format of kohya's sd-scripts, which most inference programs load.

`<layer>.lora_down.weight`, `.lora_up.weight`, `.alpha` (a scalar) and, with DoRA, `.dora_scale`,
where <layer> is the prefix and the layer's name with underscores for dots. Prefixes: `lora_unet`;
`lora_te` for SD; `lora_te1` and `lora_te2` for SDXL. Layers of SDXL's UNet have the names of
Stability's code (`input_blocks.4.1`, ...), layers of SD's have diffusers' names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from artifacts.safetensors import Arrays
from runtimes.adapters.lora_file_format import Adapters
from runtimes.families.family import KohyaNames


def to_kohya(adapters: Adapters, names: KohyaNames, unet: Mapping[str, Any]) -> Arrays:
    """The arrays of a kohya file, by key.

    Args:
        adapters: component -> layer -> adapter.
        names: the family's names in sd-scripts.
        unet: the UNet's config.

    Raises:
        ValueError: the format has no name for a layer.
    """
    arrays: Arrays = {}
    for component, layers in adapters.items():
        for layer, adapter in layers.items():
            if component == "unet":
                name, prefix = names.layer(layer, unet), "lora_unet"
            else:
                name, prefix = layer, names.text_prefixes[component]
            key = f"{prefix}_{name.replace('.', '_')}"
            arrays[f"{key}.lora_down.weight"] = adapter.down
            arrays[f"{key}.lora_up.weight"] = adapter.up
            arrays[f"{key}.alpha"] = np.array(adapter.scale * len(adapter.down), np.float32)
            if adapter.magnitude is not None:  # [out]: one norm per output
                shape = (-1, *[1] * (adapter.down.ndim - 1))
                arrays[f"{key}.dora_scale"] = adapter.magnitude.reshape(shape)
    return arrays
