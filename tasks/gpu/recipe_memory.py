"""Plans of the shipped recipes for runtime torch, computed ahead: `recipe_memory.json`.

`python -m bench.recipe_memory --write` renews the file. A plan takes up to a minute; `kiln doctor`
reads this file instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from artifacts.hashing import digest_json
from configs.checkout import CHECKOUT
from configs.load_and_extend_recipe import load_recipe, recipe_names
from configs.settings.recipe import Recipe
from runtimes.torch_models.gpu_specs import GIB, GpuSpec
from tasks.estimate_disk import in_words
from tasks.evaluate.prompts import sample_prompts
from tasks.gpu.estimate_peak_memory import STEP_SETTINGS, executed_flops
from tasks.gpu.gpu_training_plan import TYPICAL_MFU, USABLE, GpuPlan

FILE = Path(__file__).with_name("recipe_memory.json")
#: Settings beside STEP_SETTINGS that a plan reads.
TRAIN_SETTINGS = STEP_SETTINGS | {
    *("micro_batch_size", "global_batch_size", "processes", "fsdp", "steps", "epochs"),
    *("ema_decay", "sample_every_n_steps"),
}
#: Sizes of memory of common GPUs, in GB as on data sheets (2**30 bytes).
CARDS = (8, 12, 16, 24, 32, 40, 48, 80, 141)


@dataclass(frozen=True)
class RecipeMemory:
    """A recipe's plan: peak bytes on a GPU, bytes of a checkpoint, and work."""

    recipe: str
    settings: str  # sha256 of the settings that the plan reads
    training: int
    samples: int  # 0: training draws none
    sampling: int  # of the evaluation
    checkpoint: int
    parameters: int  # trained
    checkpoint_bytes: int  # on disk
    flops_per_image: float  # with recomputation
    images: int | None  # of all steps; None: known only with the number of pictures
    compute_dtype: str

    @classmethod
    def of(cls, plan: GpuPlan) -> RecipeMemory:
        """The record of a plan; it does not depend on the GPU."""
        recipe, peaks, steps = plan.recipe, plan.peaks, plan.steps
        return cls(
            recipe=recipe.name,
            settings=digest_settings(recipe),
            training=sum(peaks.training.values()),
            samples=peaks.samples,
            sampling=peaks.sampling,
            checkpoint=peaks.checkpoint,
            parameters=plan.step.parameters,
            checkpoint_bytes=plan.checkpoint_bytes,
            flops_per_image=executed_flops(plan.step),
            images=None if steps is None else steps * recipe.train.global_batch_size,
            compute_dtype=recipe.train.compute_dtype,
        )

    @property
    def largest(self) -> int:
        """Bytes of the largest peak."""
        return max(self.training, self.samples, self.sampling, self.checkpoint)

    def fits(self, memory: int) -> bool:
        """Whether it fits a GPU with `memory` bytes."""
        return self.largest <= USABLE * memory

    @property
    def card(self) -> int | None:
        """The smallest of CARDS that it fits."""
        return next((size for size in CARDS if self.fits(size * GIB)), None)

    def hours(self, gpu: GpuSpec) -> float | None:
        """Hours of training at TYPICAL_MFU; None if unknown."""
        peak = gpu.peak(self.compute_dtype)
        if peak is None or self.images is None:
            return None
        return self.images * self.flops_per_image / (peak * TYPICAL_MFU) / 3600


def digest_settings(recipe: Recipe) -> str:
    """sha256 of the settings that a plan reads."""
    models = (recipe.model.path, recipe.model.vae)
    evaluate = recipe.evaluate
    return digest_json(
        {
            "train": recipe.train.model_dump(mode="json", include=TRAIN_SETTINGS),
            "resolution": recipe.encode.resolution,
            "evaluate": [
                *(evaluate.dtype, evaluate.batch_size, len(sample_prompts(recipe))),
                *(evaluate.height, evaluate.width),
            ],
            "models": [None if path is None else _without_checkout(path) for path in models],
            **({} if recipe.encode.text_dtype is None else {"text": recipe.encode.text_dtype}),
        }
    )


def _without_checkout(path: str) -> str:
    """A model's path; that of a shipped folder is equal in all checkouts."""
    inside = Path(path).is_relative_to(CHECKOUT)
    return Path(path).relative_to(CHECKOUT).as_posix() if inside else path


def planned_recipes() -> list[str]:
    """Names of the shipped recipes of runtime torch."""
    return [name for name in recipe_names() if load_recipe(name).runtime == "torch"]


@cache
def read_table() -> Mapping[str, RecipeMemory]:
    """Digest of the settings -> plan."""
    rows: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return {row["settings"]: RecipeMemory(**row) for row in rows}


def memory_of(recipe: Recipe) -> RecipeMemory | None:
    """The plan of a recipe with the settings of a shipped one; None if there is none."""
    return None if recipe.runtime != "torch" else read_table().get(digest_settings(recipe))


def shipped_plans() -> list[RecipeMemory]:
    """The plans of the shipped recipes, the smallest first."""
    return sorted(read_table().values(), key=lambda found: found.largest)


def recipe_memory_table(gpus: tuple[GpuSpec, ...]) -> Iterator[str]:
    """Lines of the table in docs/recipes.md.

    Args:
        gpus: those that the hours are for, in columns.
    """
    heads = ["recipe", "fits a GPU of", "training", "samples", "evaluation", "a checkpoint"]
    yield _row(heads + [f"hours on {gpu.name}" for gpu in gpus])
    yield _row(["---"] * (len(heads) + len(gpus)))
    for plan in shipped_plans():
        sizes = [plan.training, plan.samples, plan.sampling]
        memory = [_gib(size) for size in sizes]
        hours = [_hours(plan, gpu) for gpu in gpus]
        stored = in_words(plan.checkpoint_bytes)
        yield _row([f"`{plan.recipe}`", f"{plan.card} GB", *memory, stored, *hours])


def _gib(size: int) -> str:
    if not size:
        return "none"
    return "below 0.1 GiB" if size < 0.1 * GIB else f"{size / GIB:.1f} GiB"


def _hours(plan: RecipeMemory, gpu: GpuSpec) -> str:
    if not plan.fits(gpu.memory):
        return "too small"
    hours = plan.hours(gpu)
    return "unknown" if hours is None else "below 0.1" if hours < 0.1 else f"{hours:,.1f}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
