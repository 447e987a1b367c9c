"""Plans of the shipped recipes for runtime torch, computed ahead: `recipe_memory.json`.

`python -m bench.recipe_memory --write` renews the file. A plan takes up to a minute; `kiln doctor`
reads this file instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from artifacts.records import digest_json
from configs.load_recipe import CHECKOUT
from configs.settings.recipe import Recipe
from runtimes.torch_models.gpu_specs import GpuSpec
from tasks.evaluate.prompts import sample_prompts
from tasks.gpu.estimate_peak_memory import STEP_SETTINGS
from tasks.gpu.gpu_training_plan import TYPICAL_MFU, USABLE

FILE = Path(__file__).with_name("recipe_memory.json")
#: Settings beside STEP_SETTINGS that a plan reads.
TRAIN_SETTINGS = STEP_SETTINGS | {
    *("micro_batch_size", "global_batch_size", "processes", "fsdp", "steps", "epochs"),
    *("ema_decay", "sample_every_n_steps"),
}


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
    product_dtype: str  # of the recipe, whose train.allow_tf32 changes nothing else here

    @property
    def largest(self) -> int:
        """Bytes of the largest peak."""
        return max(self.training, self.samples, self.sampling, self.checkpoint)

    def fits(self, memory: int) -> bool:
        """Whether it fits a GPU with `memory` bytes."""
        return self.largest <= USABLE * memory

    def hours(self, gpu: GpuSpec) -> float | None:
        """Hours of training at TYPICAL_MFU; None if unknown."""
        peak = gpu.peak(self.product_dtype)
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
            **({"offload": True} if evaluate.offload else {}),
            **({} if recipe.encode.text_dtype is None else {"text": recipe.encode.text_dtype}),
        }
    )


def _without_checkout(path: str) -> str:
    """A model's path; that of a shipped folder is equal in all checkouts."""
    inside = Path(path).is_relative_to(CHECKOUT)
    return Path(path).relative_to(CHECKOUT).as_posix() if inside else path


@cache
def read_table() -> Mapping[str, RecipeMemory]:
    """Digest of the settings -> plan."""
    rows: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return {row["settings"]: RecipeMemory(**row) for row in rows}


def memory_of(recipe: Recipe) -> RecipeMemory | None:
    """The plan of a recipe with the settings of a shipped one; None if there is none."""
    found = None if recipe.runtime != "torch" else read_table().get(digest_settings(recipe))
    return found and replace(found, product_dtype=recipe.train.product_dtype)


def shipped_plans() -> list[RecipeMemory]:
    """The plans of the shipped recipes, the smallest first."""
    return sorted(read_table().values(), key=lambda found: found.largest)
