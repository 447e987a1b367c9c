"""Dropout that a resumed run repeats."""

from __future__ import annotations

from typing import Any

import torch

from runtimes.objective.random import Stream, generator


def drops(network: torch.nn.Module) -> bool:
    """Whether a forward pass in training draws what to drop: adapters, or a base that says so."""
    modules = list(network.modules())
    layers = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in modules)
    configs: list[Any] = [getattr(module, "config", None) for module in modules]
    return layers or any(getattr(config, "attention_dropout", 0) for config in configs)


def seed_dropout(seed: int, step: int, first: int, rank: int) -> None:
    """Fix what the next forward pass drops.

    Args:
        first: the first sample of the micro-batch, among those of this rank.
    """
    rng = generator(seed, Stream.DROPOUT, step, first, rank)
    torch.manual_seed(int(rng.integers(2**63)))
