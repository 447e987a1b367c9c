"""Print the memory, time, storage and cost of a recipe's training on a TPU slice or a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from artifacts.models import ModelAway, ModelNotFound
from configs.settings.recipe import Recipe
from flows import show_gpu_plan
from flows.show_stored_plan import StoredPlan, stored_facts, stored_lines
from runtimes.torch_models.gpu_specs import GIB, Gpu, parse_gpu
from tasks.plan.gpu import memory_of, plan_gpu_training
from tasks.plan.plan import TrainingPlan
from tasks.plan.tpu import SlicePlan, plan_slice_training


class DoesNotFit(ValueError):
    """The recipe does not fit; the message has the largest batch or the settings that do."""


class TopologyMissing(ValueError):
    """Neither the command nor the recipe names a slice."""


class TwoPlaces(ValueError):
    """The command names a slice and a GPU."""


def show_plan(
    recipe: Recipe, topology: str | None, gpu: str | None, *, search: bool, as_json: bool
) -> None:
    """Print the plan.

    Args:
        topology: accelerator type of a slice, such as v5p-8; None: that of the recipe.
        gpu: memory or name of a GPU, such as 24GB or H100, instead of a slice.
        search: search for the largest batch that fits, even if it is larger than the recipe's.

    Raises:
        DoesNotFit: the recipe does not fit.
        TopologyMissing: there is no accelerator type.
        TwoPlaces: there are a slice and a GPU.
    """
    if gpu is None:
        plan = _plan_for_slice(recipe, topology, search=search)
        show(plan, slice_plan_facts(plan), _lines(plan), as_json=as_json)
        if not plan.fits:
            raise DoesNotFit(_refusal(plan))
    elif topology is not None:
        raise TwoPlaces("--gpu and --topology exclude each other")
    else:
        try:
            on_gpu = plan_gpu_training(recipe, gpu, search=search, say=_say)
        except (ModelNotFound, ModelAway) as error:
            if search:  # a stored plan knows the recipe's own batch
                raise
            _show_stored(recipe, parse_gpu(gpu), error, as_json=as_json)
            return
        show(
            on_gpu,
            show_gpu_plan.gpu_plan_facts(on_gpu),
            show_gpu_plan.lines(on_gpu),
            as_json=as_json,
        )
        if not on_gpu.fits:
            raise DoesNotFit(on_gpu.refusal())


def _show_stored(recipe: Recipe, gpu: Gpu, error: Exception, *, as_json: bool) -> None:
    """Print the plan that comes with a recipe whose model is not there; raise the error if none."""
    if (found := memory_of(recipe)) is None:
        raise error
    _say(f"{error}; this is the plan that comes with the recipe")
    plan = StoredPlan(recipe, gpu, found)
    show_rows(stored_facts(plan), stored_lines(plan), as_json=as_json)
    if not plan.fits:
        raise DoesNotFit(plan.refusal())


def _plan_for_slice(recipe: Recipe, topology: str | None, *, search: bool) -> SlicePlan:
    if topology is None:
        if recipe.tpu is None:
            raise TopologyMissing(
                f"recipe {recipe.name} has no section tpu: add --topology, such as v5p-8, or "
                "--gpu, such as 24GB"
            )
        topology = recipe.tpu.accelerator_type
    return plan_slice_training(recipe, topology, search=search, say=_say)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def show(
    plan: TrainingPlan,
    special: dict[str, Any],
    lines: Iterable[tuple[str, str]],
    *,
    as_json: bool,
) -> None:
    """Print a plan as one JSON object or as a table.

    Args:
        special: facts of this kind of accelerator.
        lines: rows of the table, name and text.
    """
    ends = [("time", _time(plan)), ("storage", _storage(plan))]
    show_rows(special | shared_facts(plan), [*lines, *ends], as_json=as_json)


def show_rows(facts: dict[str, Any], rows: Iterable[tuple[str, str]], *, as_json: bool) -> None:
    """Print facts as a JSON object, or rows as a table."""
    if as_json:
        print(json.dumps(facts))
        return
    for name, text in rows:
        print(f"{name:9} {text}")


def shared_facts(plan: TrainingPlan) -> dict[str, Any]:
    """Facts of a plan on any accelerator; unknown values are null."""
    seconds, images = plan.step_seconds, plan.recipe.train.global_batch_size
    return {
        "recipe": plan.recipe.name,
        "fits": plan.fits,
        "global_batch_size": images,
        "step_seconds": seconds,
        "images_per_second": None if seconds is None else images / seconds,
        "assumption": plan.assumption,
        "bytes_per_picture": plan.bytes_per_picture,
        "bytes_per_caption": plan.caption_bytes,
        "storage_bytes": plan.storage_bytes,
        "hours": plan.hours,
        "cost": plan.cost,
    }


def slice_plan_facts(plan: SlicePlan) -> dict[str, Any]:
    """The plan as a JSON object. Bytes and FLOPs are per chip and step; unknown values are null."""
    step, batch = plan.step, plan.batch
    return {
        "topology": plan.where.name,
        "chips": plan.where.chips,
        "compiler": step.compiler,
        "hbm_bytes": plan.where.chip.hbm_bytes,
        "argument_bytes": step.arguments,
        "temporary_bytes": step.temporaries,
        "total_bytes": step.total or None,
        "measuring_bytes": plan.measuring_bytes or None,
        "parameters": step.parameters,
        "flops_per_image": step.flops_per_image,
        "flops": step.flops or None,
        "bytes_accessed": step.bytes_accessed or None,
        "micro_batch_size": batch.micro_batch_size,
        "largest_micro_batch_size": plan.largest and plan.largest.micro_batch_size,
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
    if plan.measuring_bytes:
        yield "", f"held-out loss and samples: {plan.measuring_bytes / GIB:.2f} GiB and activations"
    work = []
    if step.flops_per_image is not None:
        work.append(f"{step.flops_per_image / 1e12:.4g} TFLOP per image")
    if step.flops:
        moved = f"{step.bytes_accessed / 1e9:,.0f} GB memory traffic"
        work.append(
            f"{step.flops / 1e12:.4g} TFLOP (with recomputation), {moved} per chip and step"
        )
    yield "work", "; ".join(work) or "unknown"
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
    verdict = (
        f"fits, {spare:.1f} GiB spare" if plan.step_fits else f"{max(-spare, 0):.1f} GiB too much"
    )
    return f"{text}, {step.total / GIB:.2f} of {hbm / GIB:g} GiB per chip: {verdict}"


def _time(plan: TrainingPlan) -> str:
    seconds, hours = plan.step_seconds, plan.hours
    if seconds is None or hours is None:
        return "unknown for a size of memory: name a GPU, such as --gpu L4"
    images = plan.recipe.train.global_batch_size
    speed = f"{images / seconds:,.1f} images/s ({plan.assumption})"
    whole = f"{plan.steps:,} steps in {show_gpu_plan.duration(hours)}"
    text = f"{seconds:.3g} s per step, {speed}; {whole}"
    return text if plan.cost is None else f"{text}, cost {plan.cost:,.0f}"


def _storage(plan: TrainingPlan) -> str:
    latents, captions = plan.latent_bytes, plan.caption_bytes
    stored = plan.recipe.encode.text.replace("_", " ")
    text = (
        f"{plan.bytes_per_picture / 1e3:,.0f} kB per picture: {latents / 1e3:,.0f} kB of latents, "
        f"{captions / 1e3:,.0f} kB of {stored} per distinct caption of a shard"
    )
    total = plan.storage_bytes
    if total is None:
        return text
    share = captions / plan.bytes_per_picture
    return f"{text}; {total / 1e9:,.1f} GB in total, at most {share:.0%} of them {stored}"


def _refusal(plan: SlicePlan) -> str:
    if plan.step_fits:
        return (
            f"held-out loss and samples during training gather the model on each chip, which needs "
            f"{plan.measuring_bytes / GIB:.1f} GiB of the {plan.where.chip.hbm_bytes / GIB:g} GiB "
            f"of a chip of {plan.where.name}: set train.holdout_loss.every_n_steps and "
            "train.sample_every_n_steps to 0, or use chips with more memory"
        )
    needed = f"{plan.step.total / GIB:.1f} GiB" if plan.step.total else "more"
    text = (
        f"train.micro_batch_size={plan.batch.micro_batch_size} needs {needed} of the "
        f"{plan.where.chip.hbm_bytes / GIB:g} GiB of a chip of {plan.where.name}: "
    )
    if plan.largest is None:
        return text + "not even one picture per chip fits; raise train.fsdp or use more chips"
    largest = plan.largest.micro_batch_size
    return text + f"the largest that fits is train.micro_batch_size={largest}"
