"""The configs of flow transformers with a language model as text encoder, to plan offline.

The sizes are the published ones. `bench/published_configs.py` writes them as pipeline folders.
"""

from __future__ import annotations

from typing import Any

Files = dict[str, dict[str, Any]]
#: Qwen3 4B, the text encoder of FLUX.2 klein 4B and of Z-Image.
QWEN3_4B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
#: An encoder of four levels, as Stable Diffusion's.
_VAE = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
}
_QWEN_TOKENIZER = {"model_max_length": 131072, "tokenizer_class": "Qwen2Tokenizer"}
_FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000}


def _index(pipeline: str, transformer: str, vae: str, text: str) -> dict[str, Any]:
    return {
        "_class_name": pipeline,
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", text],
        "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "transformer": ["diffusers", transformer],
        "vae": ["diffusers", vae],
    }


KLEIN: Files = {
    "model_index.json": _index(
        "Flux2KleinPipeline", "Flux2Transformer2DModel", "AutoencoderKLFlux2", "Qwen3ForCausalLM"
    )
    | {"is_distilled": False},
    "vae/config.json": {"_class_name": "AutoencoderKLFlux2", "latent_channels": 32, **_VAE},
    "text_encoder/config.json": QWEN3_4B,
    "tokenizer/tokenizer_config.json": _QWEN_TOKENIZER,
    "transformer/config.json": {
        "_class_name": "Flux2Transformer2DModel",
        "in_channels": 128,
        "num_layers": 5,
        "num_single_layers": 20,
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "joint_attention_dim": 7680,
        "guidance_embeds": False,
    },
    "scheduler/scheduler_config.json": _FLOW
    | {
        "shift": 3.0,
        "use_dynamic_shifting": True,
        "base_shift": 0.5,
        "max_shift": 1.15,
        "base_image_seq_len": 256,
        "max_image_seq_len": 4096,
    },
}
#: Of FLUX.1 and Z-Image.
FLUX_VAE: dict[str, Any] = {
    "_class_name": "AutoencoderKL",
    "latent_channels": 16,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    **_VAE,
}
Z_IMAGE: Files = {
    "model_index.json": _index(
        "ZImagePipeline", "ZImageTransformer2DModel", "AutoencoderKL", "Qwen3Model"
    ),
    "vae/config.json": FLUX_VAE,
    "text_encoder/config.json": QWEN3_4B,
    "tokenizer/tokenizer_config.json": _QWEN_TOKENIZER,
    "transformer/config.json": {
        "_class_name": "ZImageTransformer2DModel",
        "in_channels": 16,
        "dim": 3840,
        "n_layers": 30,
        "n_refiner_layers": 2,
        "n_heads": 30,
        "n_kv_heads": 30,
        "cap_feat_dim": 2560,
        "axes_dims": [32, 48, 48],
        "axes_lens": [1536, 512, 512],
    },
    "scheduler/scheduler_config.json": _FLOW | {"shift": 6.0},
}
QWEN_IMAGE: Files = {
    "model_index.json": _index(
        "QwenImagePipeline",
        "QwenImageTransformer2DModel",
        "AutoencoderKLQwenImage",
        "Qwen2_5_VLForConditionalGeneration",
    ),
    # diffusers' defaults are the published VAE.
    "vae/config.json": {
        "_class_name": "AutoencoderKLQwenImage",
        "z_dim": 16,
        "temperal_downsample": [False, True, True],
    },
    "text_encoder/config.json": {
        "model_type": "qwen2_5_vl",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {"hidden_size": 1280, "out_hidden_size": 3584},
    },
    "tokenizer/tokenizer_config.json": _QWEN_TOKENIZER,
    "transformer/config.json": {
        "_class_name": "QwenImageTransformer2DModel",
        "in_channels": 64,
        "out_channels": 16,
        "num_layers": 60,
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "joint_attention_dim": 3584,
        "axes_dims_rope": [16, 56, 56],
    },
    "scheduler/scheduler_config.json": _FLOW
    | {
        "shift": 1.0,
        "use_dynamic_shifting": True,
        "base_shift": 0.5,
        "max_shift": 0.9,
        "base_image_seq_len": 256,
        "max_image_seq_len": 8192,
        "shift_terminal": 0.02,
    },
}
#: Hub id -> files.
PUBLISHED: dict[str, Files] = {
    "black-forest-labs/FLUX.2-klein-base-4B": KLEIN,
    "Tongyi-MAI/Z-Image": Z_IMAGE,
    "Qwen/Qwen-Image": QWEN_IMAGE,
}
