"""Compute dtypes that the shared PyTorch models support in training."""

from __future__ import annotations

from configs.settings.train import Train
from runtimes.contract import WrongInput


def check_precision(settings: Train) -> None:
    """Raise WrongInput for float16, which needs a loss scale."""
    if settings.compute_dtype == "float16":
        raise WrongInput("train.mixed_precision: fp16 is for runtime mindspore: set bf16")
