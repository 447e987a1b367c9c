"""The key layout in which kohya's sd-scripts store adapters, which most drawing programs read.

`<layer>.lora_down.weight`, `.lora_up.weight`, `.alpha` (a scalar) and, with DoRA, `.dora_scale`,
where <layer> is `lora_unet_...`, or `lora_te_...` of SD and `lora_te1_...`, `lora_te2_...` of SDXL,
with underscores for dots. The layers of SDXL's UNet have the names of Stability's own code
(`input_blocks.4.1`, ...), those of SD's are diffusers'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from artifacts.safetensors import Arrays
from runtimes.adapters.lora import Adapters
from runtimes.families.family import KohyaNames


def to_kohya(adapters: Adapters, names: KohyaNames, unet: Mapping[str, Any]) -> Arrays:
    """Adapters by the names of the layout.

    Args:
        names: of the family that the adapters are for.
        unet: the UNet's config.

    Raises:
        ValueError: a layer has no name in the layout.
    """
    arrays: Arrays = {}
    for part, layers in adapters.items():
        for layer, adapter in layers.items():
            if part == "unet":
                name, prefix = names.layer(layer, unet), "lora_unet"
            else:
                name, prefix = layer, names.text_prefixes[part]
            key = f"{prefix}_{name.replace('.', '_')}"
            arrays[f"{key}.lora_down.weight"] = adapter.down
            arrays[f"{key}.lora_up.weight"] = adapter.up
            arrays[f"{key}.alpha"] = np.array(adapter.scale * len(adapter.down), np.float32)
            if adapter.magnitude is not None:  # a length for each output
                shape = (-1, *[1] * (adapter.down.ndim - 1))
                arrays[f"{key}.dora_scale"] = adapter.magnitude.reshape(shape)
    return arrays
