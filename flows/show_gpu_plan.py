"""Facts and lines of a plan for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from runtimes.torch_models.gpu_specs import GIB
from tasks.gpu.advice import Advice
from tasks.gpu.gpu_training_plan import GpuPlan


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
    other = "" if plan.recipe.runtime == "torch" else ", planned for runtime torch"
    parameters = f"{step.parameters / 1e6:,.1f} M trained parameters"
    yield "recipe", f"{plan.recipe.name}, {parameters}{other}"
    count = "" if plan.chips == 1 else f"{plan.chips} times "
    memory = f"{plan.gpu.memory / GIB:g} GiB, {plan.usable / GIB:.1f} GiB of it for tensors"
    yield "gpu", f"{count}{plan.gpu.name}: {memory}"
    micro = settings.micro_batch(settings.processes)
    yield "batch", f"{settings.global_batch_size} in micro-batches of {micro}"
    yield "training", _gib(sum(peaks.training.values())) + " at the peak: " + _parts(peaks.training)
    if peaks.samples:
        yield "samples", f"{_gib(peaks.samples)} while training draws samples"
    yield "sampling", f"{_gib(peaks.sampling)} in the evaluation"
    yield (
        "saving",
        f"{_gib(peaks.checkpoint)} while a checkpoint of "
        f"{plan.checkpoint_bytes / 1e9:,.1f} GB is written",
    )
    spare = (plan.usable - peaks.largest) / GIB
    verdict = f"fits, {spare:.1f} GiB spare" if plan.fits else f"{-spare:.1f} GiB too much"
    yield "memory", f"{_gib(peaks.largest)} of {_gib(plan.usable)}: {verdict}"
    recomputed = step.recomputed_flops_per_image / 1e12
    more = f", and {recomputed:.4g} of recomputation" if recomputed else ""
    yield "work", f"{step.flops_per_image / 1e12:.4g} TFLOP per image{more}"
    if plan.largest_micro_batch is not None:
        yield "largest", f"train.micro_batch_size {plan.largest_micro_batch} fits"
    for advice in plan.advice:
        yield "advice", _advice(advice)


def _advice(advice: Advice) -> str:
    change = advice.flops_ratio - 1
    words = "equal FLOPs" if abs(change) < 0.005 else f"{change:+.0%} FLOPs"
    notes = "".join(f"; {note}" for note in advice.notes)
    return f"{advice.options}: {_gib(advice.peak)}, {words}{notes}"


def _parts(parts: dict[str, int]) -> str:
    named = ((name.replace("_", " "), size) for name, size in parts.items() if size)
    return ", ".join(f"{name} {size / GIB:.2f}" for name, size in named)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
