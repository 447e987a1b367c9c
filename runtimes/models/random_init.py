"""A denoiser that has learnt nothing, for training from scratch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import diffusers
import torch

from runtimes.contract import WrongInput


def fresh_denoiser(config: Mapping[str, Any], seed: int) -> Any:
    """A denoiser as diffusers initialises it, in float32 on the CPU.

    The weights depend on the seed alone, for one version of PyTorch: they are drawn by its
    generator, in the order in which diffusers makes its layers.

    Raises:
        WrongInput: it is no denoiser's config.
    """
    try:
        kind = getattr(diffusers, config["_class_name"])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return kind.from_config(config)
    except (ValueError, TypeError, RuntimeError, KeyError, AttributeError) as error:
        raise WrongInput(f"train.denoiser_config makes no denoiser: {error}") from None
