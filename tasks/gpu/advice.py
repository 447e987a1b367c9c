"""Settings that make a recipe fit a GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import attrgetter
from typing import Any

from configs.settings.recipe import Recipe
from runtimes.torch_models.gpu_specs import GIB
from tasks.gpu.estimate_peak_memory import Planner, executed_flops, micro_batch, with_train

Change = tuple[dict[str, Any], str]  # train settings, and what they cost besides FLOPs
#: Changes that save memory, cheapest first.
CHANGES: tuple[Change, ...] = (
    (
        {"gradient_checkpointing": "blocks", "cuda_graphs": False},
        "activations are computed twice",
    ),
    ({"lora.base_precision": "int8"}, "8-bit weights of the frozen base"),
    ({"optimizer": "adamw_8bit"}, "8-bit moments; needs bitsandbytes"),
    ({"ema_decay": None, "ema_every_n_steps": 1}, "publishes the last weights, not their average"),
    ({"method": "lora"}, "trains adapters, not all weights; needs a higher learning_rate"),
)


@dataclass(frozen=True)
class Advice:
    """Changed settings that make a recipe fit."""

    settings: dict[str, Any]  # dotted setting -> value
    peak: int  # bytes
    flops_ratio: float  # executed FLOPs per picture, relative to the recipe's
    notes: tuple[str, ...]  # what the changes cost besides FLOPs

    @property
    def options(self) -> str:
        """The settings as options of `kiln run`."""
        values = {n: v if isinstance(v, str) else json.dumps(v) for n, v in self.settings.items()}
        return " ".join(f"-o {name}={value}" for name, value in values.items())


def advise(planner: Planner, recipe: Recipe, usable: int) -> list[Advice]:
    """Minimal sets of changes that make a recipe fit, those with the fewest FLOPs first.

    Adapters are advised only if nothing else fits.

    Args:
        usable: bytes for tensors.
    """
    smaller, sampling = _smaller_sampling(planner, recipe, usable)
    changes = [
        change
        for change in CHANGES
        if _applies(change[0], recipe) and planner.permits(with_train(recipe, change[0]).train)
    ]
    cheap = [change for change in changes if "method" not in change[0]]
    before = executed_flops(planner.step(recipe.train))
    found: list[Advice] = []
    for settings, notes in _that_fit(planner, smaller, cheap, usable) or _that_fit(
        planner, smaller, changes, usable
    ):
        variant = with_train(smaller, settings)
        ratio = executed_flops(planner.step(variant.train)) / before
        changed = {n: v for n, v in settings.items() if attrgetter(n)(recipe.train) != v}
        dotted = {f"train.{name}": value for name, value in changed.items()} | sampling
        peaks = planner.peaks(variant)
        if "evaluate.offload" in sampling:
            notes += (f"{peaks.host / GIB:.1f} GiB of the host's memory for the evaluation",)
        found.append(Advice(dotted, peaks.largest, ratio, notes))
    return sorted(found, key=lambda advice: (advice.flops_ratio, len(advice.settings)))


def _that_fit(
    planner: Planner, recipe: Recipe, changes: Sequence[Change], usable: int
) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    """Minimal sets of changes that fit, with the largest micro-batch for each, and their notes.

    A set with more changes must permit a larger micro-batch than each of its subsets.
    """
    current, _ = micro_batch(recipe.train)
    sets = [_merged(some) for n in range(len(changes) + 1) for some in combinations(changes, n)]
    is_lora = recipe.train.method == "lora"
    sets = [s for s in sets if is_lora or "method" in s[0] or "lora.base_precision" not in s[0]]
    variants = [with_train(recipe, settings) for settings, _ in sets]
    planner.compute([planner.training_request(variant.train) for variant in variants])
    kept: dict[frozenset[str], int] = {}
    found = []
    for (settings, notes), variant in zip(sets, variants, strict=True):
        names = frozenset(settings)
        size = planner.largest_micro_batch(variant, usable, current)
        if size is None or any(names >= k and size <= other for k, other in kept.items()):
            continue
        kept[names] = size
        smaller = {} if size == current else {"micro_batch_size": size}
        found.append((settings | smaller, notes))
    return found


def _merged(changes: Sequence[Change]) -> tuple[dict[str, Any], tuple[str, ...]]:
    settings = {name: value for change, _ in changes for name, value in change.items()}
    return settings, tuple(note for _, note in changes)


def _smaller_sampling(
    planner: Planner, recipe: Recipe, usable: int
) -> tuple[Recipe, dict[str, Any]]:
    """The recipe with the largest evaluate.batch_size whose sampling fits, and what it changes.

    Layers are offloaded only if no batch fits without.
    """
    given = recipe.evaluate
    sizes = range(given.batch_size, 0, -1)
    for offload in sorted({given.offload, given.offload or recipe.runtime == "torch"}):
        for size in sizes:
            evaluate = given.model_copy(update={"batch_size": size, "offload": offload})
            variant = recipe.model_copy(update={"evaluate": evaluate})
            if planner.peaks(variant).sampling <= usable:
                changed = {"batch_size": size, "offload": offload}
                return variant, {
                    f"evaluate.{name}": value
                    for name, value in changed.items()
                    if getattr(given, name) != value
                }
    return recipe, {}


def _applies(change: dict[str, Any], recipe: Recipe) -> bool:
    """Whether a change is one, and is permitted."""
    settings = recipe.train
    if "lora.base_precision" in change:
        is_possible = recipe.runtime == "torch" and settings.fsdp == 1 and not settings.lora.dora
        return is_possible and settings.init == "base" and settings.lora.base_precision is None
    if "optimizer" in change:
        is_possible = recipe.runtime == "torch" and settings.fsdp == 1
        return is_possible and settings.optimizer == "adamw"
    if "method" in change:
        return settings.method == "full" and settings.init == "base"
    return any(getattr(settings, name) != value for name, value in change.items())
