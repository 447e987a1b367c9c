"""Model folders: config.json of each part, model_index.json, the scheduler's config."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from fuzz.mutations import encode, mutate, mutate_tree
from fuzz.reader import Reader

from artifacts.records import canonical_json
from configs.errors import Refused
from configs.settings.train import Train
from runtimes.objective.noise_schedule import read_schedule, read_scheduler_config
from runtimes.pipeline_folder.folder import Base, folder_extras, read_config, trained_config

BASE = Path(__file__).parents[2] / "demo" / "base"
#: Stable Diffusion 3, which has a T5 and a transformer.
SD3: dict[str, dict[str, Any]] = {
    "model_index.json": {
        "_class_name": "StableDiffusion3Pipeline",
        "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
        "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
        "text_encoder_3": ["transformers", "T5EncoderModel"],
    },
    "vae/config.json": {
        "block_out_channels": [16, 32, 64],
        "latent_channels": 16,
        "scaling_factor": 1.5,
        "shift_factor": 0.06,
    },
    "text_encoder/config.json": {
        "hidden_size": 32,
        "projection_dim": 24,
        "max_position_embeddings": 77,
    },
    "text_encoder_2/config.json": {
        "hidden_size": 32,
        "projection_dim": 24,
        "max_position_embeddings": 77,
    },
    "text_encoder_3/config.json": {"d_model": 80},
    "tokenizer_3/tokenizer_config.json": {"model_max_length": 20},
    "transformer/config.json": {
        "_class_name": "SD3Transformer2DModel",
        "joint_attention_dim": 80,
        "patch_size": 2,
        "in_channels": 16,
    },
}
SCHEDULERS: list[dict[str, Any]] = [
    {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0, "num_train_timesteps": 1000},
    {"_class_name": "DDIMScheduler", "beta_schedule": "linear", "trained_betas": None},
    {"_class_name": "DDPMScheduler", "trained_betas": [0.1, 0.2], "rescale_betas_zero_snr": True},
    {"_class_name": "DDPMScheduler", "beta_schedule": "squaredcos_cap_v2"},
]


def readers(folder: Path) -> list[Reader]:
    sdxl, sd3 = folder / "sdxl", folder / "sd3"
    shutil.copytree(BASE, sdxl, ignore=shutil.ignore_patterns("*.safetensors", "*.txt", "vocab*"))
    for name, config in SD3.items():
        (sd3 / name).parent.mkdir(parents=True, exist_ok=True)
        (sd3 / name).write_text(json.dumps(config))
    scheduler = json.loads((sdxl / "scheduler" / "scheduler_config.json").read_bytes())
    names = ["model_index.json", "vae/config.json", "text_encoder/config.json"]
    names += ["text_encoder_2/config.json"]
    return [
        _pipeline("configs of SDXL", sdxl, names),
        _pipeline("configs of SD3", sd3, list(SD3)),
        _scheduler(folder / "scheduler", [scheduler, *SCHEDULERS]),
        _denoiser(sdxl / "unet"),
    ]


def _change(path: Path, valid: bytes, rng: Random) -> None:
    is_tree = rng.randrange(3)
    tree = json.loads(valid)
    path.write_bytes(encode(mutate_tree(tree, rng), rng) if is_tree else mutate(valid, rng))


def _pipeline(name: str, folder: Path, names: list[str]) -> Reader:
    valid = {file: (folder / file).read_bytes() for file in names}

    def read(rng: Random) -> bool:
        file = rng.choice(names)
        _change(folder / file, valid[file], rng)
        try:
            found = Base.open(folder).encoders
        except Refused:
            return False
        finally:
            (folder / file).write_bytes(valid[file])
        canonical_json(found)
        sizes = ("latent_channels", "vae_scale_factor", "size_step", "tokens", "caption_tokens")
        for size in (*sizes, "prompt_dim"):
            assert type(found[size]) is int and found[size] > 0, f"{size} is {found[size]!r}"
        for factor in ("scaling_factor", "shift_factor"):
            value = found[factor]
            assert type(value) in (int, float) and math.isfinite(value), f"{factor}: {value!r}"
        return True

    return Reader(name, 6, read)


def _scheduler(folder: Path, configs: list[dict[str, Any]]) -> Reader:
    folder.mkdir()
    path = folder / "scheduler_config.json"

    def read(rng: Random) -> bool:
        _change(path, json.dumps(rng.choice(configs)).encode(), rng)
        try:
            read_scheduler_config(folder)
            schedule = read_schedule(folder, Train() if rng.randrange(2) else None)
        except Refused:
            return False
        table = schedule.sigmas if hasattr(schedule, "sigmas") else schedule.alphas_cumprod
        assert table.ndim == 1 and len(table) and np.isfinite(table).all(), "no noise schedule"
        assert ((table >= 0) & (table <= 1)).all(), "noise levels outside of 0 to 1"
        return True

    return Reader("scheduler config", 6, read)


def _denoiser(folder: Path) -> Reader:
    path = folder / "config.json"
    valid = path.read_bytes()
    base = json.loads(valid)

    def read(rng: Random) -> bool:
        _change(path, valid, rng)
        settings = Train(inpainting=bool(rng.randrange(2)))
        try:
            folder_extras(folder)
            trained_config(read_config(path), settings)
            trained_config(base, settings, read_config(path))
        except Refused:
            return False
        finally:
            path.write_bytes(valid)
        return True

    return Reader("denoiser config", 4, read)
