"""Facts and lines of a plan that comes with a shipped recipe, for a machine without its model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from configs.settings.recipe import Recipe
from flows.show_gpu_plan import duration, gib, gpu_row, memory_row, recipe_row, saving_row
from runtimes.torch_models.gpu_specs import GIB, Gpu
from tasks.plan.gpu import TYPICAL_MFU, USABLE, RecipeMemory

#: Facts of a GPU plan that need the model's configs.
UNKNOWN = (
    *("training_parts_gib", "flops_per_image", "recomputed_flops_per_image"),
    *("largest_micro_batch_size", "advice", "plan_seconds", "bytes_per_picture"),
    *("bytes_per_caption", "storage_bytes", "step_seconds", "images_per_second"),
)


@dataclass(frozen=True)
class StoredPlan:
    """A recipe's stored plan on a GPU."""

    recipe: Recipe
    gpu: Gpu
    found: RecipeMemory

    @property
    def usable(self) -> int:
        """Bytes of the GPU's memory for tensors."""
        return int(USABLE * self.gpu.memory)

    @property
    def fits(self) -> bool:
        return self.found.fits(self.gpu.memory)

    @property
    def hours(self) -> float | None:
        return None if self.gpu.spec is None else self.found.hours(self.gpu.spec)

    @property
    def cost(self) -> float | None:
        price = self.recipe.plan.chip_hour_price
        return None if price is None else self.hours and self.hours * price

    @property
    def assumption(self) -> str:
        """The assumption behind `hours`."""
        return f"at {TYPICAL_MFU:.0%} of the GPU's peak, batches always ready"

    def refusal(self) -> str:
        """The error of a recipe that does not fit."""
        return (
            f"{self.recipe.name} needs {self.found.largest / GIB:.1f} GiB, {self.gpu.name} has "
            f"{self.usable / GIB:.1f} GiB for tensors; with the hub's configs, `kiln plan` names "
            "the settings that fit"
        )


def stored_facts(plan: StoredPlan) -> dict[str, Any]:
    """As a plan's facts; what needs the model's configs is null."""
    found = plan.found
    return {
        **dict.fromkeys(UNKNOWN),
        "recipe": plan.recipe.name,
        "gpu": plan.gpu.name,
        "gpus": 1,
        "memory_gib": plan.gpu.memory / GIB,
        "usable_gib": plan.usable / GIB,
        "peak_gib": found.largest / GIB,
        "training_gib": found.training / GIB,
        "samples_gib": found.samples / GIB,
        "sampling_gib": found.sampling / GIB,
        "checkpointing_gib": found.checkpoint / GIB,
        "checkpoint_bytes": found.checkpoint_bytes,
        "parameters": found.parameters,
        "fits": plan.fits,
        "global_batch_size": plan.recipe.train.global_batch_size,
        "assumption": plan.assumption,
        "hours": plan.hours,
        "cost": plan.cost,
    }


def stored_lines(plan: StoredPlan) -> Iterator[tuple[str, str]]:
    """Rows of the table, name and text."""
    found = plan.found
    yield "recipe", recipe_row(plan.recipe, found.parameters)
    yield "gpu", gpu_row(plan.gpu, plan.usable)
    yield "training", f"{gib(found.training)} at the peak"
    if found.samples:
        yield "samples", f"{gib(found.samples)} while training draws samples"
    yield "sampling", f"{gib(found.sampling)} in the evaluation"
    yield "saving", saving_row(found.checkpoint, found.checkpoint_bytes)
    yield "memory", memory_row(found.largest, plan.usable)
    yield "work", f"{found.flops_per_image / 1e12:.4g} TFLOP per image, with recomputation"
    hours = "unknown" if plan.hours is None else f"{duration(plan.hours)} ({plan.assumption})"
    yield "time", hours if plan.cost is None else f"{hours}, cost {plan.cost:,.0f}"
