"""Write the configs of FLUX.1 dev or schnell as a pipeline folder without weights, to plan offline.

`python -m bench.flux_configs FOLDER [--schnell]`, then `kiln plan flux-lora -o model.path=FOLDER`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.flow_configs import FLUX_VAE

#: The published sizes: the transformer's are diffusers' defaults; CLIP is ViT-L/14's text encoder,
#: T5 is v1.1-XXL.
CLIP_L = {
    "model_type": "clip_text_model",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "max_position_embeddings": 77,
    "vocab_size": 49408,
    "projection_dim": 768,
    "hidden_act": "quick_gelu",
}
T5 = {
    "model_type": "t5",
    "d_model": 4096,
    "d_ff": 10240,
    "d_kv": 64,
    "num_heads": 64,
    "num_layers": 24,
    "vocab_size": 32128,
    "feed_forward_proj": "gated-gelu",
}
INDEX = {
    "_class_name": "FluxPipeline",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


def write(folder: Path, *, schnell: bool = False) -> Path:
    """Write the configs; returns the folder."""
    configs: dict[str, dict[str, Any]] = {
        "model_index.json": INDEX,
        "vae/config.json": FLUX_VAE,
        "text_encoder/config.json": CLIP_L,
        "text_encoder_2/config.json": T5,
        "tokenizer/tokenizer_config.json": {"model_max_length": 77},
        "tokenizer_2/tokenizer_config.json": {"model_max_length": 512},
        "transformer/config.json": {
            "_class_name": "FluxTransformer2DModel",
            "guidance_embeds": not schnell,
            "in_channels": 64,
            "joint_attention_dim": 4096,
            "pooled_projection_dim": 768,
            "num_attention_heads": 24,
            "attention_head_dim": 128,
            "num_layers": 19,
            "num_single_layers": 38,
        },
        "scheduler/scheduler_config.json": {
            "_class_name": "FlowMatchEulerDiscreteScheduler",
            "shift": 1.0 if schnell else 3.0,
            "use_dynamic_shifting": not schnell,
            "base_shift": 0.5,
            "max_shift": 1.15,
            "base_image_seq_len": 256,
            "max_image_seq_len": 4096,
        },
    }
    for name, config in configs.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--schnell", action="store_true")
    given = parser.parse_args()
    write(given.folder, schnell=given.schnell)
