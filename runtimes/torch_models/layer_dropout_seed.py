"""Reproducible dropout: a resumed run draws the same masks."""

from __future__ import annotations

from typing import Any

import torch

from runtimes.objective.counter_based_random import Stream, generator


def has_dropout(network: torch.nn.Module) -> bool:
    """Whether a training forward pass draws dropout masks, in layers or in attention."""
    modules = list(network.modules())
    layers = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in modules)
    configs: list[Any] = [getattr(module, "config", None) for module in modules]
    return layers or any(getattr(config, "attention_dropout", 0) for config in configs)


def seed_dropout(seed: int, step: int, first: int, rank: int) -> None:
    """Seed PyTorch's default generators for the dropout masks of the next forward pass.

    Args:
        seed: of the run.
        step: number of the batch, from 0.
        first: index of the micro-batch's first sample within this rank's batch.
        rank: of this process; each rank draws other masks.
    """
    rng = generator(seed, Stream.DROPOUT, step, first, rank)
    torch.manual_seed(int(rng.integers(2**63)))
