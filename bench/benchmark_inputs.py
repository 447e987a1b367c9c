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

from configs.load_recipe import CHECKOUT
from configs.settings.recipe import Recipe

BASE = CHECKOUT / "demo/base"
TOKENS = 77
CAPTIONS = 16  # of random latents
#: Folders of published configs, by the last part of the hub id: enough for `kiln plan`.
MODELS = CHECKOUT / "bench/models"
#: A UNet in SDXL's layout with 39.9 M parameters; the demo's has 2.7 M, SDXL's 2,567 M.
MIDDLE_UNET = MODELS / "mid/unet"


def published(path: str) -> Path:
    """The config folder of a published model by its hub id; any other path as it is."""
    folder = MODELS / path.rpartition("/")[2]
    return folder if folder.is_dir() else Path(path)


def list_recipe(
    folder: Path,
    *,
    path: str,
    format: str | None = None,
    where: str | None = None,
    **sections: dict[str, Any],
) -> Recipe:
    """A recipe of a list of URLs, to run its first stages; its store is a new folder.

    Args:
        folder: has the store.
        path: path of the list, in `format`; None: by its suffix.
        where: condition of the list's rows; None: all are rows.
        sections: sections of the recipe, such as `download`.
    """
    store = folder / "store"
    store.mkdir(parents=True, exist_ok=True)
    source = {"kind": "urls", "path": path, "where": where}
    source |= {} if format is None else {"format": format}
    return Recipe.model_validate(
        {
            "name": "bench",
            "model": {"path": str(BASE)},
            "store": str(store),
            "source": source,
            "evaluate": {"clip": "unused", "prompts": {"all": {"prompts": ["a"]}}},
            "publish": {"name": "unused"},
            **sections,
        }
    )


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


def write_pipeline(folder: Path, unet: Path | None = None) -> Path:
    """Write the demo's base in float32, or with a random UNet of the config in a folder."""
    import torch
    from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel

    parts = {}
    if unet is not None:
        torch.manual_seed(0)
        parts["unet"] = UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(unet))
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


def write_full_size(folder: Path, model: Path) -> Path:
    """Write a pipeline in bf16 with random weights and small encoders; its folder.

    VAE (f = 8) and text encoders have outputs of the published shapes: a training step costs the
    same, encoding does not.

    Args:
        model: config folder; `-small-encoders` beside it has the configs of the encoders.
    """
    copytree(model, folder)
    copytree(model.with_name(f"{model.name}-small-encoders"), folder, dirs_exist_ok=True)
    encoders = [path.name for path in sorted(folder.glob("text_encoder*"))]
    return write_weights(folder, ["unet", "vae", *encoders])


def write_published(folder: Path, hub_id: str, parts: Sequence[str]) -> Path:
    """Write a published pipeline's configs and some components' random weights; its folder."""
    return write_weights(copytree(published(hub_id), folder), parts)


def write_weights(pipeline: Path, parts: Sequence[str]) -> Path:
    """Write random bf16 weights of some components, such as `unet`; returns the pipeline's folder.

    The tokenizers are the demo's.
    """
    import diffusers
    import torch
    import transformers

    from runtimes.torch.device import free_memory

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


def write_random_latents(
    folder: Path, model: Path, samples: int, size: int, shards: int = 1, captions: int = CAPTIONS
) -> str:
    """Write a latents artifact of random numbers for a pipeline; its URL.

    A step takes as long as with encoded pictures of `size` x `size` pixels.

    Args:
        model: pipeline folder; its config files suffice.
        captions: captions of each shard; its pictures share them in turns.
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
    count = samples // shards
    texts = 1 + min(captions, count)

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
            caption_rows=(1 + number % (texts - 1),),
        )

    group = f"train/{side}x{side}"
    store = Store(str(folder / "store"))
    draft = store.draft(KeyParts("encode", 1, {"info": info, "samples": samples}, {}))
    path = folder / "shard.safetensors"
    for shard in range(shards):
        rows = Texts(
            normal(texts, info["tokens"], info["prompt_dim"]),
            normal(texts, info["pooled_dim"]) if info["pooled_dim"] else None,
            random.integers(512, size=(texts, encoders, TOKENS)),
        )
        write_latent_shard(path, {group: [sample(number) for number in range(count)]}, rows)
        counts = {"groups": {group: count}, "bad": 0}
        files = {".safetensors": str(path)}
        draft.add_shard(store.commit_shard("encode", f"{shard:064x}", files, counts))
    draft.write("latents.json", json.dumps(info).encode())
    return str(draft.commit({}, {}).uri)
