"""Inputs of both sides of a comparison: pictures, and pipelines in float32."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
from PIL import Image

from bench.published_configs import write_published_configs
from configs.load_recipe import CHECKOUT

BASE = CHECKOUT / "demo/base"
TOKENS = 77
CAPTIONS = 16  # of random latents
#: A UNet in SDXL's layout with 39.9 M parameters; the demo's has 2.7 M, SDXL's 2,567 M.
MIDDLE_UNET: dict[str, Any] = {
    "sample_size": 16,
    "block_out_channels": (128, 256, 256),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 2,
    "transformer_layers_per_block": 1,
    "attention_head_dim": (2, 4, 4),  # number of heads (diffusers' name is wrong): 64 channels each
    "use_linear_projection": True,
    "cross_attention_dim": 128,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 32,
    "projection_class_embeddings_input_dim": 6 * 32 + 64,
}


def write_images(folder: Path, count: int, size: int) -> Path:
    """Write the demo's first `count` pictures, of `size` x `size` pixels, for diffusers' scripts.

    The folder has PNG files and a `metadata.jsonl` with `file_name` and `text`.
    """
    import pyarrow.parquet as pq

    from demo import dataset

    rows = pq.read_table(dataset.write(folder.with_name(f"{folder.name}-list"))).to_pylist()
    folder.mkdir(parents=True)
    with (folder / "metadata.jsonl").open("w", encoding="utf-8") as lines:
        for number, row in enumerate(rows[:count]):
            name = f"{number:05d}.png"
            with Image.open(folder.with_name(f"{folder.name}-list") / row["url"]) as picture:
                picture.resize((size, size), Image.Resampling.NEAREST).save(folder / name)
            lines.write(json.dumps({"file_name": name, "text": row["caption"]}) + "\n")
    return folder


def write_pipeline(folder: Path, unet: dict[str, Any] | None = None) -> Path:
    """Write the demo's base in float32, or with a random UNet of the config `unet`."""
    import torch
    from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel

    parts = {}
    if unet is not None:
        torch.manual_seed(0)
        parts["unet"] = UNet2DConditionModel(**unet)
    pipeline = StableDiffusionXLPipeline.from_pretrained(
        BASE, torch_dtype=torch.float32, add_watermarker=False, **parts
    )
    pipeline.save_pretrained(folder)
    return folder


def count_parameters(folder: Path) -> int:
    """Parameters of the UNet in a pipeline folder."""
    from safetensors import safe_open

    with safe_open(folder / "unet" / "diffusion_pytorch_model.safetensors", "np") as file:
        slices = (file.get_slice(name).get_shape() for name in file.keys())  # noqa: SIM118
        return sum(math.prod(shape) for shape in slices)


def write_full_size(folder: Path, config: Path) -> Path:
    """Write a pipeline in bf16 whose UNet has random weights and the config.json `config`.

    The VAE (f = 8) and the text encoders are small, with outputs of the published shapes: a
    training step costs the same, encoding does not.
    """
    import torch
    from diffusers import (
        DDPMScheduler,
        StableDiffusionPipeline,
        StableDiffusionXLPipeline,
        UNet2DConditionModel,
    )
    from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

    from runtimes.torch.device import free_memory

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"  # initialization of SDXL is slow on CPU
    with torch.device(device):
        unet = UNet2DConditionModel.from_config(json.loads(config.read_text(encoding="utf-8")))
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    tokenizer = CLIPTokenizer.from_pretrained(BASE / "tokenizer", local_files_only=True)
    width = unet.config.cross_attention_dim
    parts: dict[str, Any] = {"unet": unet, "vae": _small_vae(), "scheduler": scheduler}
    if unet.config.addition_embed_type == "text_time":
        first = width * 3 // 8  # SDXL: 768 of 2048
        sizes = 6 * unet.config.addition_time_embed_dim
        pooled = unet.config.projection_class_embeddings_input_dim - sizes
        pipeline: Any = StableDiffusionXLPipeline(
            **parts,
            text_encoder=CLIPTextModel(_text_config(tokenizer, first, first)),
            text_encoder_2=CLIPTextModelWithProjection(
                _text_config(tokenizer, width - first, pooled)
            ),
            tokenizer=tokenizer,
            tokenizer_2=tokenizer,
            add_watermarker=False,
        )
    else:
        pipeline = StableDiffusionPipeline(
            **parts,
            text_encoder=CLIPTextModel(_text_config(tokenizer, width, width)),
            tokenizer=tokenizer,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    pipeline.to(device="cpu", dtype=torch.bfloat16).save_pretrained(folder)
    free_memory()  # of this process, which lives while others are measured
    return folder


def write_published(folder: Path, hub_id: str, parts: Sequence[str]) -> Path:
    """Write a published pipeline's configs, and random bf16 weights of some components.

    Args:
        folder: of the pipeline's folder, which is returned.
        hub_id: a key of published_configs.write_published_configs.
        parts: components, such as `unet`; CLIP's tokenizer is the demo's.
    """
    import diffusers
    import torch
    import transformers

    from runtimes.torch.device import free_memory

    pipeline = write_published_configs(folder)[hub_id]
    index = json.loads((pipeline / "model_index.json").read_text(encoding="utf-8"))
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"  # initialization is slow on CPU
    for part in parts:
        library, name = index[part]
        kind: Any = getattr(diffusers if library == "diffusers" else transformers, name)
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                if library == "diffusers":
                    model = kind.from_config(kind.load_config(pipeline / part))
                else:
                    model = kind(kind.config_class.from_pretrained(pipeline / part))
        finally:
            torch.set_default_dtype(torch.float32)
        model.to(device="cpu", dtype=torch.bfloat16).save_pretrained(pipeline / part)
        if library == "transformers":
            tokenizer = part.replace("text_encoder", "tokenizer")
            copytree(BASE / "tokenizer", pipeline / tokenizer, dirs_exist_ok=True)
    free_memory()  # of this process, which lives while others are measured
    return pipeline


def _small_vae() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        mid_block_add_attention=False,
        latent_channels=4,
        norm_num_groups=4,
        scaling_factor=0.18215,
    )


def _text_config(tokenizer: Any, width: int, projection: int) -> Any:
    from transformers import CLIPTextConfig

    return CLIPTextConfig(
        hidden_size=width,
        intermediate_size=width,
        num_attention_heads=4,
        num_hidden_layers=2,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        projection_dim=projection,
    )


def write_random_latents(folder: Path, model: Path, samples: int, size: int) -> str:
    """Write a latents artifact of random numbers for a pipeline; its URL.

    A step takes as long as with encoded pictures of `size` x `size` pixels.

    Args:
        model: pipeline folder; its config files suffice.
    """
    from artifacts.latent_shards import LatentSample, Texts, write_latent_shard
    from artifacts.store import KeyParts, Store
    from runtimes.families import family_named
    from runtimes.pipeline_folder.folder import Base

    info = dict(Base.open(model).encoders)
    random = np.random.default_rng(0)
    side = size // info["vae_scale_factor"]
    channels = info["latent_channels"]
    encoders = len(family_named(info["family"]).clip_encoders)

    def normal(*shape: int) -> Any:
        return random.standard_normal(shape, dtype=np.float32)

    def sample(number: int) -> LatentSample:
        return LatentSample(
            mean=normal(channels, side, side),
            logvar=normal(channels, side, side) - 4,
            id=random.bytes(32),
            original_size=(size, size),
            crop_top_left=(0, 0),
            target_size=(size, size),
            flip=False,
            caption_rows=(1 + number % CAPTIONS,),
        )

    texts = Texts(
        normal(1 + CAPTIONS, info["tokens"], info["prompt_dim"]),
        normal(1 + CAPTIONS, info["pooled_dim"]) if info["pooled_dim"] else None,
        random.integers(512, size=(1 + CAPTIONS, encoders, TOKENS)),
    )
    group = f"train/{side}x{side}"
    store = Store(str(folder / "store"))
    draft = store.draft(KeyParts("encode", 1, {"info": info, "samples": samples}, {}))
    path = folder / "shard.safetensors"
    write_latent_shard(path, {group: [sample(number) for number in range(samples)]}, texts)
    counts = {"groups": {group: samples}, "bad": 0}
    shard = store.commit_shard("encode", f"{0:064x}", {".safetensors": str(path)}, counts)
    draft.add_shard(shard)
    draft.write("latents.json", json.dumps(info).encode())
    return str(draft.commit({}, {}).uri)
