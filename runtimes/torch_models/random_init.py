"""Randomly initialized denoisers, for training from scratch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import diffusers
import torch

from runtimes.contract import WrongInput


def random_init_denoiser(config: Mapping[str, Any], seed: int) -> Any:
    """Construct a denoiser with diffusers' random initialization, in float32 on the CPU.

    With the same versions of PyTorch and diffusers, the weights depend on the seed alone.

    Raises:
        WrongInput: the config does not describe a denoiser.
    """
    try:
        kind = getattr(diffusers, config["_class_name"])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return kind.from_config(config)
    except Exception as error:  # of any type, such as AssertionError without a message
        reason = str(error) or type(error).__name__
        raise WrongInput(f"train.denoiser_config makes no denoiser: {reason}") from None
