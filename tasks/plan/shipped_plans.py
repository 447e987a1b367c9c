"""Plans of the shipped recipes for runtime torch, computed ahead.

A plan takes up to a minute; `kiln doctor` reads `recipe_memory.json` instead. `python -m
bench.recipe_memory --write` renews it.
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
from configs.settings.train import Train
from runtimes.torch_models.gpu_specs import USABLE, GpuSpec
from tasks.evaluate.metrics import sample_prompts
from tasks.plan.gpu_memory import STEP_SETTINGS
from tasks.plan.gpu_time import seconds_per_image
from tasks.plan.plan import planned_references

FILE = Path(__file__).with_name("recipe_memory.json")
#: Settings beside STEP_SETTINGS that a plan reads.
TRAIN_SETTINGS = STEP_SETTINGS | Train.names_with("plan", "run")
ENCODE_SETTINGS = {"resolution", "batch_size", "dtype", "text", "text_precision", "offload"}


@dataclass(frozen=True)
class RecipeMemory:
    """A recipe's plan: peak bytes on a GPU, bytes of a checkpoint, and work."""

    recipe: str
    settings: str  # sha256 of the settings that the plan reads
    training: int
    samples: int  # 0: training draws none
    sampling: int  # of the evaluation
    encoding: int
    checkpoint: int
    parameters: int  # trained
    checkpoint_bytes: int  # on disk
    flops_per_image: float  # with recomputation
    images: int | None  # of all steps; None: known only with the number of pictures
    product_dtype: str  # of the recipe, whose train.allow_tf32 changes nothing else here
    host: int = 0  # bytes of the host's memory
    slowdown: float = 1.0  # as of gpu_time.py
    copied_per_image: float = 0.0  # bytes of streamed blocks

    @property
    def largest(self) -> int:
        """Bytes of the largest peak."""
        return max(self.training, self.samples, self.sampling, self.encoding, self.checkpoint)

    def fits(self, memory: int) -> bool:
        """Whether it fits a GPU with `memory` bytes."""
        return self.largest <= USABLE * memory

    def hours(self, gpu: GpuSpec) -> float | None:
        """Hours of training at TYPICAL_MFU; None if unknown."""
        about = (self.flops_per_image, self.slowdown, self.copied_per_image)
        seconds = seconds_per_image(gpu, self.product_dtype, *about)
        return None if not seconds or self.images is None else self.images * seconds / 3600


def digest_settings(recipe: Recipe) -> str:
    """sha256 of the settings that a plan reads."""
    models = (recipe.model.path, recipe.model.vae)
    evaluate = recipe.evaluate
    train = recipe.train.model_dump(mode="json", include=TRAIN_SETTINGS, exclude_defaults=True)
    return digest_json(
        {
            "train": train,
            "encode": recipe.encode.model_dump(mode="json", include=ENCODE_SETTINGS)
            | recipe.encode.model_dump(include={"max_tokens"}, exclude_defaults=True),
            "evaluate": [
                *(evaluate.dtype, evaluate.batch_size, len(sample_prompts(recipe.evaluate))),
                *(evaluate.height, evaluate.width),
            ],
            "models": [None if path is None else _without_checkout(path) for path in models],
            **({"offload": True} if evaluate.offload else {}),
            **({"has_prior": True} if recipe.has_prior else {}),
            **({"references": references} if (references := planned_references(recipe)) else {}),
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
    """The plan of a recipe with the settings of a shipped recipe; None if there is none."""
    shipped = None if recipe.runtime != "torch" else read_table().get(digest_settings(recipe))
    return shipped and replace(shipped, product_dtype=recipe.train.product_dtype)


def shipped_plans() -> list[RecipeMemory]:
    """The plans of the shipped recipes, the smallest first."""
    return sorted(read_table().values(), key=lambda plan: plan.largest)
