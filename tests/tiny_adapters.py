"""LoRA adapters of random numbers for the tiny SDXL."""

from pathlib import Path

import numpy as np

from artifacts.safetensors import write_arrays
from configs.settings.train_parts import Lora
from runtimes.adapters.lora_files import metadata

RANK = 2
#: Layers of the tiny SDXL: outputs, and the shape of what goes in.
LAYERS: dict[str, tuple[int, tuple[int, ...]]] = {
    "unet.conv_in": (16, (4, 3, 3)),
    "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q": (32, (32,)),
} | {
    f"text_encoder{which}.text_model.encoder.layers.{number}.{layer}": (out, (32,))
    for which in ("", "_2")
    for number in range(2)
    for layer, out in (("self_attn.q_proj", 32), ("mlp.fc1", 48))
}


def make_lora(path: Path) -> Path:
    """Adapters of random numbers, with a scale of 5 / 2."""
    rng = np.random.default_rng(0)
    arrays = {}
    for name, (out, into) in LAYERS.items():
        ones = (1,) * (len(into) - 1)
        arrays[f"{name}.lora_A.weight"] = rng.normal(size=(RANK, *into)).astype(np.float32)
        arrays[f"{name}.lora_B.weight"] = rng.normal(size=(out, RANK, *ones)).astype(np.float32)
    with path.open("wb") as stream:
        write_arrays(stream, arrays, metadata(arrays, Lora(rank=RANK, alpha=5.0)))
    return path
