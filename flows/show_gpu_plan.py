"""Facts and lines of a plan for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from configs.settings.recipe import Recipe
from runtimes.torch_models.gpu_specs import GIB, Gpu
from tasks.plan.gpu import Advice, GpuPlan
from tasks.plan.plan import in_words


def gpu_plan_facts(plan: GpuPlan) -> dict[str, Any]:
    """What a plan for a GPU has besides the facts of every plan; unknown values are null."""
    step, peaks = plan.step, plan.peaks
    return {
        "gpu": plan.gpu.name,
        "gpus": plan.chips,
        "memory_gib": plan.gpu.memory / GIB,
        "usable_gib": plan.usable / GIB,
        "peak_gib": peaks.largest / GIB,
        "training_gib": sum(peaks.training.values()) / GIB,
        "training_parts_gib": {name: size / GIB for name, size in peaks.training.items()},
        "samples_gib": peaks.samples / GIB,
        "sampling_gib": peaks.sampling / GIB,
        "checkpointing_gib": peaks.checkpoint / GIB,
        "host_gib": peaks.host / GIB,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "parameters": step.parameters,
        "flops_per_image": step.flops_per_image,
        "recomputed_flops_per_image": step.recomputed_flops_per_image,
        "largest_micro_batch_size": plan.largest_micro_batch,
        "advice": [_advice_facts(plan, advice) for advice in plan.advice],
        "plan_seconds": plan.seconds,
    }


def _advice_facts(plan: GpuPlan, advice: Advice) -> dict[str, Any]:
    images = None
    if plan.step_seconds is not None:
        now = plan.recipe.train.global_batch_size / plan.step_seconds
        images = now / advice.flops_ratio
    return {
        "settings": advice.settings,
        "peak_gib": advice.peak / GIB,
        "flops_ratio": advice.flops_ratio,
        "images_per_second": images,
        "notes": list(advice.notes),
    }


def lines(plan: GpuPlan) -> Iterator[tuple[str, str]]:
    """Rows of the table, name and text."""
    step, peaks, settings = plan.step, plan.peaks, plan.recipe.train
    yield "recipe", recipe_row(plan.recipe, step.parameters)
    count = "" if plan.chips == 1 else f"{plan.chips} times "
    yield "gpu", f"{count}{gpu_row(plan.gpu, plan.usable)}"
    micro = settings.micro_batch(settings.processes)
    yield "batch", f"{settings.global_batch_size} in micro-batches of {micro}"
    yield "training", gib(sum(peaks.training.values())) + " at the peak: " + _parts(peaks.training)
    if peaks.samples:
        yield "samples", f"{gib(peaks.samples)} while training draws samples"
    yield "sampling", f"{gib(peaks.sampling)} in the evaluation"
    if peaks.host:
        yield "host", f"{gib(peaks.host)} of the host's memory for offloaded weights"
    yield "saving", saving_row(peaks.checkpoint, plan.checkpoint_bytes)
    yield "memory", memory_row(peaks.largest, plan.usable)
    recomputed = step.recomputed_flops_per_image / 1e12
    more = f", and {recomputed:.4g} of recomputation" if recomputed else ""
    yield "work", f"{step.flops_per_image / 1e12:.4g} TFLOP per image{more}"
    if plan.largest_micro_batch is not None:
        yield "largest", f"train.micro_batch_size {plan.largest_micro_batch} fits"
    for advice in plan.advice:
        yield "advice", _advice(advice)


def recipe_row(recipe: Recipe, parameters: int) -> str:
    other = "" if recipe.runtime == "torch" else ", planned for runtime torch"
    return f"{recipe.name}, {parameters / 1e6:,.1f} M trained parameters{other}"


def gpu_row(gpu: Gpu, usable: int) -> str:
    return f"{gpu.name}: {gpu.memory / GIB:g} GiB, {usable / GIB:.1f} GiB of it for tensors"


def saving_row(peak: int, checkpoint_bytes: int) -> str:
    return f"{gib(peak)} while a checkpoint of {in_words(checkpoint_bytes)} is written"


def memory_row(peak: int, usable: int) -> str:
    """The verdict: what is spare, or too much."""
    spare = (usable - peak) / GIB
    verdict = f"fits, {spare:.1f} GiB spare" if spare >= 0 else f"{-spare:.1f} GiB too much"
    return f"{gib(peak)} of {gib(usable)}: {verdict}"


def _advice(advice: Advice) -> str:
    change = advice.flops_ratio - 1
    words = "equal FLOPs" if abs(change) < 0.005 else f"{change:+.0%} FLOPs"
    notes = "".join(f"; {note}" for note in advice.notes)
    return f"{advice.options}: {gib(advice.peak)}, {words}{notes}"


def _parts(parts: dict[str, int]) -> str:
    named = ((name.replace("_", " "), size) for name, size in parts.items() if size)
    return ", ".join(f"{name} {size / GIB:.2f}" for name, size in named)


def duration(hours: float) -> str:
    """Of a short training, minutes: it is not done in 0.0 hours."""
    return f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"


def gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
