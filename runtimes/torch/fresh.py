"""A denoiser that has learnt nothing, for training from scratch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch

from runtimes.base import WrongInput
from runtimes.encoders import read_config
from runtimes.families import check_fits


def fresh_denoiser(base: Path, seed: int, config: dict[str, Any] | None = None) -> Any:
    """A denoiser as diffusers initialises it, in float32 on the CPU.

    The weights depend on the seed alone, for one version of PyTorch: they are drawn by its
    generator, in the order in which diffusers makes its layers.

    Args:
        base: the folder of the base's denoiser.
        config: one of another size, in place of the base's.

    Raises:
        WrongInput: it is no config, or its denoiser does not fit the rest of the base.
    """
    wanted = read_config(base / "config.json")
    config = wanted if config is None else config
    check_fits(config, wanted)
    try:
        kind = getattr(diffusers, config["_class_name"])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return kind.from_config(config)
    except (ValueError, TypeError, RuntimeError, KeyError, AttributeError) as error:
        raise WrongInput(f"train.denoiser_config makes no denoiser: {error}") from None
