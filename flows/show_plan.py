"""Print the memory, time, storage and cost of a recipe's training on a TPU slice."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from configs.recipe import Recipe
from tasks.tpu.training_plan import SlicePlan, make_plan

GIB = 2**30


class DoesNotFit(ValueError):
    """The recipe's batch does not fit the slice; the message has the largest that does."""


class TopologyMissing(ValueError):
    """Neither the command nor the recipe names a slice."""


def show_plan(recipe: Recipe, topology: str | None, *, search: bool, as_json: bool) -> None:
    """Print the plan.

    Args:
        topology: accelerator type, such as v5p-8; None: that of the recipe.
        search: search for the largest batch that fits, even if the recipe's fits.

    Raises:
        DoesNotFit: the recipe's batch does not fit.
        TopologyMissing: there is no accelerator type.
    """
    if topology is None:
        if recipe.tpu is None:
            raise TopologyMissing(
                f"recipe {recipe.name} has no section tpu: add --topology, such as v5p-8"
            )
        topology = recipe.tpu.accelerator_type
    plan = make_plan(recipe, topology, search=search, say=lambda text: print(text, file=sys.stderr))
    if as_json:
        print(json.dumps(facts(plan)))
    else:
        for name, text in _lines(plan):
            print(f"{name:9} {text}")
    if not plan.fits:
        raise DoesNotFit(_refusal(plan))


def facts(plan: SlicePlan) -> dict[str, Any]:
    """The plan as a JSON object. Bytes and FLOPs are per chip and step; unknown values are null."""
    step, batch, seconds = plan.step, plan.batch, plan.step_seconds
    return {
        "recipe": plan.recipe.name,
        "topology": plan.where.name,
        "chips": plan.where.chips,
        "compiler": step.compiler,
        "fits": plan.fits,
        "hbm_bytes": plan.where.chip.hbm_bytes,
        "argument_bytes": step.arguments,
        "temporary_bytes": step.temporaries,
        "total_bytes": step.total or None,
        "parameters": step.parameters,
        "flops_per_image": step.flops_per_image,
        "flops": step.flops or None,
        "bytes_accessed": step.bytes_accessed or None,
        "global_batch_size": batch.global_batch_size,
        "micro_batch_size": batch.micro_batch_size,
        "step_seconds": seconds,
        "images_per_second": None if seconds is None else batch.global_batch_size / seconds,
        "assumption": plan.assumption,
        "largest_micro_batch_size": plan.largest and plan.largest.micro_batch_size,
        "bytes_per_picture": plan.bytes_per_picture,
        "storage_bytes": plan.storage_bytes,
        "hours": plan.hours,
        "cost": plan.cost,
        "plan_seconds": step.seconds,
    }


def _lines(plan: SlicePlan) -> Iterator[tuple[str, str]]:
    step, where, batch = plan.step, plan.where, plan.batch
    other = "" if plan.recipe.runtime == "jax" else ", planned for runtime jax"
    parameters = f"{step.parameters / 1e6:,.1f} M trained parameters"
    yield "recipe", f"{plan.recipe.name}, {parameters}{other}"
    yield "slice", f"{where.name}: {where.chips} chips ({where.topology}), {where.hosts} hosts"
    yield "compiler", f"{step.compiler}, in {step.seconds:.0f} s"
    yield (
        "batch",
        f"{batch.global_batch_size} in {batch.micro_batches} micro-batches of {batch.per_chip} "
        f"pictures per chip, fsdp {plan.recipe.train.fsdp}",
    )
    yield "memory", _memory(plan)
    work = []
    if step.flops_per_image is not None:
        work.append(f"{step.flops_per_image / 1e12:.4g} TFLOP per image")
    if step.flops:
        moved = f"{step.bytes_accessed / 1e9:,.0f} GB memory traffic"
        work.append(
            f"{step.flops / 1e12:.4g} TFLOP (with recomputation), {moved} per chip and step"
        )
    yield "work", "; ".join(work) or "unknown"
    yield "time", _time(plan)
    storage = f"{plan.bytes_per_picture / 1e3:,.0f} kB of latents and embeddings per picture"
    total = "" if plan.storage_bytes is None else f", {plan.storage_bytes / 1e9:,.1f} GB in total"
    yield "storage", storage + total
    if plan.largest is not None:
        yield "largest", f"train.micro_batch_size {plan.largest.micro_batch_size} fits"


def _memory(plan: SlicePlan) -> str:
    step, hbm = plan.step, plan.where.chip.hbm_bytes
    text = f"{step.arguments / GIB:.2f} GiB arguments"
    if not step.total:
        return f"{text}; the rest exceeds the {hbm / GIB:g} GiB per chip"
    if step.temporaries:
        text += f" + {step.temporaries / GIB:.2f} GiB temporaries"
    spare = (hbm - step.total) / GIB
    verdict = f"fits, {spare:.1f} GiB spare" if plan.fits else f"{max(-spare, 0):.1f} GiB too much"
    return f"{text}, {step.total / GIB:.2f} of {hbm / GIB:g} GiB per chip: {verdict}"


def _time(plan: SlicePlan) -> str:
    seconds, hours = plan.step_seconds, plan.hours
    if seconds is None or hours is None:
        return "unknown"
    speed = f"{plan.batch.global_batch_size / seconds:,.1f} images/s ({plan.assumption})"
    text = f"{seconds:.3g} s per step, {speed}; {plan.steps:,} steps in {hours:,.1f} hours"
    return text if plan.cost is None else f"{text}, cost {plan.cost:,.0f}"


def _refusal(plan: SlicePlan) -> str:
    needed = f"{plan.step.total / GIB:.1f} GiB" if plan.step.total else "more"
    text = (
        f"train.micro_batch_size={plan.batch.micro_batch_size} needs {needed} of the "
        f"{plan.where.chip.hbm_bytes / GIB:g} GiB of a chip of {plan.where.name}: "
    )
    if plan.largest is None:
        return text + "not even one picture per chip fits; raise train.fsdp or use more chips"
    largest = plan.largest.micro_batch_size
    return text + f"the largest that fits is train.micro_batch_size={largest}"
