"""A denoiser that has learnt nothing, for training from scratch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import torch

from runtimes.base import WrongInput

#: What the base's VAE and text encoders ask of any denoiser between them.
SHARED = (
    "_class_name",
    "in_channels",
    "out_channels",
    "cross_attention_dim",
    "joint_attention_dim",
    "pooled_projection_dim",
)


def fresh_denoiser(base: Path, seed: int, config: Path | None = None) -> Any:
    """A denoiser as diffusers initialises it, in float32 on the CPU.

    The weights depend on the seed alone, for one version of PyTorch: they are drawn by its
    generator, in the order in which diffusers makes its layers.

    Args:
        base: the folder of the base's denoiser.
        config: a config.json of another size, in place of the base's.

    Raises:
        WrongInput: it is no config, or its denoiser does not fit the rest of the base.
    """
    path = config or base / "config.json"
    settings = _read(path)
    for name, wanted in _read(base / "config.json").items():
        if name in SHARED and settings.get(name, wanted) != wanted:
            raise WrongInput(f"{path}: {name} is {settings[name]}, the base's is {wanted}")
    try:
        kind = getattr(diffusers, settings["_class_name"])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return kind.from_config(settings)
    except (ValueError, TypeError, RuntimeError, KeyError, AttributeError) as error:
        raise WrongInput(f"{path}: not a denoiser's config: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise WrongInput(f"{path}: not a denoiser's config: {error}") from None
