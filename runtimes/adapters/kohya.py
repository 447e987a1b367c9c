"""The key layout in which kohya's sd-scripts store adapters, which most drawing programs read.

`<layer>.lora_down.weight`, `.lora_up.weight`, `.alpha` (a scalar) and, with DoRA, `.dora_scale`,
where <layer> is `lora_unet_...`, or `lora_te_...` of SD and `lora_te1_...`, `lora_te2_...` of SDXL,
with underscores for dots. The layers of SDXL's UNet have the names of Stability's own code
(`input_blocks.4.1`, ...), those of SD's are diffusers'.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from artifacts.safetensors import Arrays
from runtimes.adapters.lora import Adapters

#: Families that the layout is made for; SD3's layers are cut otherwise in it.
FAMILIES = ("sd", "sdxl")
_TEXTS = {
    "sd": {"text_encoder": "lora_te"},
    "sdxl": {"text_encoder": "lora_te1", "text_encoder_2": "lora_te2"},
}
_TOP = {
    "conv_in": "input_blocks.0.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}
_IN_RESNET = {
    "conv1": "in_layers.2",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
_BLOCK = re.compile(r"(down|mid|up)_blocks?(?:\.(\d+))?\.(\w+?)s\.(\d+)\.(.+)")


def to_kohya(adapters: Adapters, family: str, unet: Mapping[str, Any]) -> Arrays:
    """Adapters by the names of the layout.

    Args:
        family: one of FAMILIES.
        unet: the UNet's config.
    """
    arrays: Arrays = {}
    for part, layers in adapters.items():
        for layer, adapter in layers.items():
            if part == "unet":
                name = stability_name(layer, unet) if family == "sdxl" else layer
                prefix = "lora_unet"
            else:
                name, prefix = layer, _TEXTS[family][part]
            key = f"{prefix}_{name.replace('.', '_')}"
            arrays[f"{key}.lora_down.weight"] = adapter.down
            arrays[f"{key}.lora_up.weight"] = adapter.up
            arrays[f"{key}.alpha"] = np.array(adapter.scale * len(adapter.down), np.float32)
            if adapter.magnitude is not None:  # a length for each output
                shape = (-1, *[1] * (adapter.down.ndim - 1))
                arrays[f"{key}.dora_scale"] = adapter.magnitude.reshape(shape)
    return arrays


def stability_name(layer: str, unet: Mapping[str, Any]) -> str:
    """The name that a layer of diffusers' UNet2DConditionModel has in Stability's code.

    There a block's layers are counted through: in `input_blocks` after conv_in, each block with its
    downsampler; in `output_blocks` each with its upsampler behind the last of them.
    """
    if layer in _TOP:
        return _TOP[layer]
    match = _BLOCK.fullmatch(layer)
    if match is None:
        raise ValueError(f"{layer} has no name in Stability's code")
    if not isinstance(unet["layers_per_block"], int):
        raise ValueError("Stability's code has as many layers in every block")
    side, block, kind, number, rest = match.groups()
    block, number, each = int(block or 0), int(number), unet["layers_per_block"] + 1
    rest = _IN_RESNET.get(rest, rest) if kind == "resnet" else rest
    if side == "mid":
        return f"middle_block.{1 if kind == 'attention' else 2 * number}.{rest}"
    if kind == "downsampler":
        return f"input_blocks.{(block + 1) * each}.0.op"
    if kind == "upsampler":
        place = 2 if "CrossAttn" in unet["up_block_types"][block] else 1
        return f"output_blocks.{(block + 1) * each - 1}.{place}.{rest}"
    at, place = block * each + number, int(kind == "attention")
    counted = f"input_blocks.{at + 1}" if side == "down" else f"output_blocks.{at}"
    return f"{counted}.{place}.{rest}"
