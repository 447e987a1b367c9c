"""LoRA adapters of random numbers: for some layers of the tiny SDXL, or for those of any base."""

import json
from pathlib import Path

import diffusers
import numpy as np
import torch
import transformers

from artifacts.safetensors import write_arrays
from configs.settings.train_parts import Lora
from runtimes.adapters.lora import choose_layers, layers_of, stored_name
from runtimes.adapters.lora_files import metadata
from runtimes.pipeline_folder.folder import Base

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


def write_adapters_of(path: Path, base: Base, lora: Lora, *, texts: bool = False) -> Path:
    """Adapters of random numbers for a base's denoiser, and its CLIP encoders if `texts`."""
    rng = np.random.default_rng(1)
    arrays = {}
    for part in (base.family.denoiser, *(base.family.clip_encoders if texts else ())):
        shapes = {
            stored_name(part, name): tuple(weight.shape)
            for name, weight in _on_meta(base, part).named_parameters()
        }
        chosen = choose_layers(part, layers_of(shapes), lora, base.family.attention_layers)
        for layer in chosen:
            out, *into = shapes[f"{layer}.weight"]
            sides = {"A": (lora.rank, *into), "B": (out, lora.rank, *[1] * (len(into) - 1))}
            for side, shape in sides.items():
                drawn = rng.normal(size=shape).astype(np.float32)
                arrays[f"{part}.{layer}.lora_{side}.weight"] = drawn
    with path.open("wb") as stream:
        write_arrays(stream, arrays, metadata(arrays, lora))
    return path


def _on_meta(base: Base, part: str) -> torch.nn.Module:
    """A component without values, from its config."""
    config = json.loads((base.part(part) / "config.json").read_text(encoding="utf-8"))
    library = diffusers if part == base.family.denoiser else transformers
    kind = getattr(library, str(base.class_of(part)))
    with torch.device("meta"):
        if library is diffusers:
            network = kind.from_config(config)
        else:
            network = kind(kind.config_class(**config))
    assert isinstance(network, torch.nn.Module)
    return network
