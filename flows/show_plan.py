"""Print the memory, time, storage and cost of a recipe's training on a TPU slice or a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from artifacts.store import Store
from configs.checks import Check, enter, note
from configs.errors import Refused
from configs.settings.recipe import Recipe
from runtimes.torch_models.gpu_specs import GIB, Gpu, parse_gpu
from tasks.data_set import DataSet
from tasks.plan.gpu import GpuPlan, plan_for
from tasks.plan.gpu_advice import Advice
from tasks.plan.plan import TrainingPlan, open_configs, planned_references
from tasks.plan.tpu import SlicePlan, plan_slice_training
from tasks.preflight import Doors
from tasks.progress import bytes_in_words, gib, hours_in_words
from tasks.publish.promotion_gate import check_prompts


def gpu_plan_facts(plan: GpuPlan) -> dict[str, Any]:
    """What a plan for a GPU has besides the facts of every plan; unknown values are null."""
    peaks = plan.peaks
    step = plan.step
    return {
        "gpu": plan.gpu.name,
        "gpus": plan.chips,
        "memory_gib": plan.gpu.memory / GIB,
        "usable_gib": plan.gpu.usable / GIB,
        "tested": plan.gpu.spec is None or plan.gpu.spec.tested,
        "peak_gib": peaks.largest / GIB,
        "training_gib": peaks.training / GIB,
        "samples_gib": peaks.samples / GIB,
        "sampling_gib": peaks.sampling / GIB,
        "encoding_gib": peaks.encoding / GIB,
        "checkpointing_gib": peaks.checkpoint / GIB,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "parameters": step.parameters,
        "training_parts_gib": {name: size / GIB for name, size in peaks.parts.items()},
        "host_gib": peaks.host / GIB,
        "flops_per_image": step.flops_per_image,
        "recomputed_flops_per_image": step.recomputed_flops_per_image,
        "largest_micro_batch_size": plan.largest_micro_batch,
        "advice": [_advice_facts(plan, advice) for advice in plan.advice],
        "plan_seconds": plan.seconds,
        **(_facts_of_hosts(plan) if plan.recipe.train.hosts > 1 else {}),
    }


def _facts_of_hosts(plan: GpuPlan) -> dict[str, Any]:
    return {
        "hosts": plan.recipe.train.hosts,
        "network_gbits": plan.recipe.plan.network_gbits,
        "crossing_bytes": plan.crossing.bytes,
        "crossing_seconds": plan.crossing_seconds,
        "crossing_share": plan.step_seconds and plan.crossing_seconds / plan.step_seconds,
        "computing_seconds": plan.computing_seconds,
        "one_host_seconds": _one_host_seconds(plan),
    }


def _one_host_seconds(plan: GpuPlan) -> float | None:
    """Seconds per step of the same batch on one host."""
    return plan.computing_seconds and plan.computing_seconds * plan.recipe.train.hosts


def _advice_facts(plan: GpuPlan, advice: Advice) -> dict[str, Any]:
    images = None
    if plan.step_seconds is not None and plan.recipe.train.hosts == 1:
        now = plan.recipe.train.global_batch_size / plan.step_seconds
        images = now / advice.time_ratio
    return {
        "settings": advice.settings,
        "options": advice.options,
        "peak_gib": advice.peak / GIB,
        "host_gib": advice.host / GIB,
        "flops_ratio": advice.flops_ratio,
        "time_ratio": advice.time_ratio,
        "hours": _advised_hours(plan, advice),
        "images_per_second": images,
        "notes": list(advice.notes),
    }


def _advised_hours(plan: GpuPlan, advice: Advice) -> float | None:
    """None on several hosts, too: a change of settings may change what crosses."""
    if plan.hours is None or plan.recipe.train.hosts > 1:
        return None
    return plan.hours * advice.time_ratio


LISTED = 4  # advices of a table


def _references(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """The row of the references that a picture has in the planned step, if any."""
    if planned := planned_references(recipe):
        height, width = planned[0]
        yield "reference", f"{len(planned)} per picture, {height} x {width} pixels"


def lines(plan: GpuPlan) -> Iterator[tuple[str, str]]:
    """Rows of the table, name and text."""
    step = plan.step
    settings = plan.recipe.train
    yield "recipe", recipe_row(plan.recipe, step.parameters)
    count = "" if plan.chips == 1 else f"{plan.chips} times "
    yield "gpu", f"{count}{gpu_row(plan.gpu)}"
    micro = settings.micro_batch(settings.world_size)
    yield "batch", f"{settings.global_batch_size} in micro-batches of {micro}"
    yield from _references(plan.recipe)
    sizes = [(name.replace("_", " "), size) for name, size in plan.peaks.parts.items() if size]
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in sizes)
    yield from memory_rows(plan, parts)
    recomputed = step.recomputed_flops_per_image / 1e12
    more = f", and {recomputed:.4g} of recomputation" if recomputed else ""
    yield "work", f"{step.flops_per_image / 1e12:.4g} TFLOP per image{more}"
    if settings.hosts > 1:
        yield from _rows_of_hosts(plan)
    if plan.largest_micro_batch is not None:
        yield "largest", f"train.micro_batch_size {plan.largest_micro_batch} fits"
    for advice in plan.advice[:LISTED]:
        yield "advice", _advice(plan, advice)


def _rows_of_hosts(plan: GpuPlan) -> Iterator[tuple[str, str]]:
    """What crosses hosts, and how long a step is on one host and on all."""
    train = plan.recipe.train
    sent = f"gradients {bytes_in_words(int(plan.crossing.gradients))}"
    if train.hosts_of_group > 1:
        sent += f", weights of groups across hosts {bytes_in_words(int(plan.crossing.weights))}"
    yield (
        "network",
        f"each of {train.hosts} hosts sends per step: {sent}; "
        f"{plan.crossing_seconds:.3g} s at {plan.recipe.plan.network_gbits:g} Gbit/s",
    )
    computing = plan.computing_seconds
    alone = _one_host_seconds(plan)
    seconds = plan.step_seconds
    if computing is None or alone is None or seconds is None:
        return
    yield (
        "hosts",
        f"{computing:.3g} s of computation and {plan.crossing_seconds:.3g} s between hosts "
        f"({plan.crossing_seconds / seconds:.0%}): {alone / seconds:.3g} times as fast as one "
        f"host, with {alone:.3g} s per step",
    )


def recipe_row(recipe: Recipe, parameters: int, planned: str = "torch") -> str:
    other = "" if recipe.runtime == planned else f", planned for runtime {planned}"
    return f"{recipe.name}, {parameters / 1e6:,.1f} M trained parameters{other}"


def gpu_row(gpu: Gpu) -> str:
    text = f"{gpu.name}: {gpu.memory / GIB:g} GiB, {gib(gpu.usable, 1)} of it for tensors"
    is_tested = gpu.spec is None or gpu.spec.tested
    return text if is_tested else f"{text}; untested: planned as a CUDA device"


def memory_rows(plan: GpuPlan, parts: str) -> Iterator[tuple[str, str]]:
    """Rows of the peaks; the last is the verdict."""
    peaks = plan.peaks
    yield "training", f"{gib(peaks.training)} at the peak: {parts}"
    if peaks.samples:
        yield "samples", f"{gib(peaks.samples)} while training draws samples"
    yield "sampling", f"{gib(peaks.sampling)} in the evaluation"
    yield "encoding", f"{gib(peaks.encoding)} in the encode stage"
    if peaks.host:
        yield "host", f"{gib(peaks.host)} of the host's memory for offloaded and streamed weights"
        yield "", "a smaller host reads the rest of offloaded ones in each pass, which is slower"
    written = bytes_in_words(plan.checkpoint_bytes)
    yield "saving", f"{gib(peaks.checkpoint)} while a checkpoint of {written} is written"
    usable = plan.gpu.usable
    spare = usable - peaks.largest
    yield "memory", f"{gib(peaks.largest)} of {gib(usable)}: {verdict(spare, fits=spare >= 0)}"


def verdict(spare: int, *, fits: bool) -> str:
    """What is spare, or too much."""
    return f"fits, {gib(spare, 1)} spare" if fits else f"{gib(max(-spare, 0), 1)} too much"


def _advice(plan: GpuPlan, advice: Advice) -> str:
    change = advice.time_ratio - 1
    words = "equal time" if abs(change) < 0.005 else f"{change:+.0%} time"
    if (hours := _advised_hours(plan, advice)) is not None:
        words += f" ({hours_in_words(hours)})"
    notes = "".join(f"; {note}" for note in advice.notes)
    return f"{advice.options}: {gib(advice.peak)}, {words}{notes}"


def show_plan(
    recipe: Recipe, topology: str | None, gpu: str | None, *, search: bool, as_json: bool
) -> None:
    """Print the plan.

    Args:
        topology: accelerator type of a slice, such as v5p-8; None: that of the recipe.
        gpu: memory or name of a GPU, such as 24GB or H100, instead of a slice.
        search: search for the largest batch that fits, even if it is larger than the recipe's.

    Raises:
        Refused: the recipe does not fit.
        Refused: there is no accelerator type.
        Refused: there are a slice and a GPU.
    """
    doors = Doors(recipe, ("train",), fetch=False)
    store = Store(recipe.store)
    few = check_prompts(recipe.publish.gate, recipe.evaluate)
    prompts = Check("prompts of the gate", lambda: map(note, few))
    enter([*doors.settings(), prompts, doors.gate_power(store if store.is_local else None)])
    if gpu is None:
        if topology is None:
            if recipe.tpu is None:
                raise Refused(
                    f"recipe {recipe.name} has no section tpu: add --topology, such as v5p-8, or "
                    "--gpu, such as 24GB"
                )
            topology = recipe.tpu.accelerator_type
        plan = plan_slice_training(recipe, topology, search=search, say=_say)
        show(plan, slice_plan_facts(plan), _lines(plan), as_json=as_json)
        if not plan.fits:
            raise Refused(_refusal(plan))
    elif topology is not None:
        raise Refused("--gpu and --topology exclude each other")
    else:
        memory = parse_gpu(gpu)
        on_gpu = plan_for(recipe, memory, open_configs(recipe), _say, search=search)
        show(on_gpu, gpu_plan_facts(on_gpu), lines(on_gpu), as_json=as_json)
        if not on_gpu.fits:
            raise Refused(on_gpu.refusal())


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def show(
    plan: TrainingPlan, special: dict[str, Any], lines: Iterable[tuple[str, str]], *, as_json: bool
) -> None:
    """Print a plan as one JSON object or as a table.

    Args:
        special: facts of this kind of accelerator.
        lines: rows of the table, name and text.
    """
    facts = special | shared_facts(plan)
    ends = [("time", _time(plan)), ("storage", _storage(plan))]
    if facts["rows_dropped"]:
        words = f"{facts['rows']:,} rows; source.where drops {facts['rows_dropped']:,}"
        ends.append(("source", f"{words}, as of the newest run"))
    show_rows(facts, [*lines, *ends], as_json=as_json)


def show_rows(facts: dict[str, Any], rows: Iterable[tuple[str, str]], *, as_json: bool) -> None:
    """Print facts as a JSON object, or rows as a table."""
    if as_json:
        print(json.dumps(facts))
        return
    for name, text in rows:
        print(f"{name:9} {text}")


def shared_facts(plan: TrainingPlan) -> dict[str, Any]:
    """Facts of a plan on any accelerator; unknown values are null."""
    seconds = plan.step_seconds
    images = plan.recipe.train.global_batch_size
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
        **_source_rows(plan.recipe),
    }


def _source_rows(recipe: Recipe) -> dict[str, int | None]:
    """The rows of a source with a condition, and those that it drops, as of the newest run."""
    planned = None
    if getattr(recipe.source, "where", None) is not None:
        planned = DataSet.newest(Store(recipe.store), recipe.name).artifacts.get("plan")
    rows = {} if planned is None else planned.summary
    return {"rows": rows.get("rows"), "rows_dropped": rows.get("dropped")}


def slice_plan_facts(plan: SlicePlan) -> dict[str, Any]:
    """The plan as a JSON object. Bytes and FLOPs are per chip and step; unknown values are null."""
    step = plan.step
    batch = plan.batch
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
    step = plan.step
    where = plan.where
    batch = plan.batch
    yield "recipe", recipe_row(plan.recipe, step.parameters, "jax")
    yield "slice", f"{where.name}: {where.chips} chips ({where.topology}), {where.hosts} hosts"
    yield "compiler", f"{step.compiler}, in {step.seconds:.0f} s"
    yield (
        "batch",
        f"{batch.global_batch_size} in {batch.micro_batches} micro-batches of {batch.per_chip} "
        f"pictures per chip, fsdp {plan.recipe.train.fsdp}",
    )
    yield from _references(plan.recipe)
    yield "memory", _memory(plan)
    if plan.measuring_bytes:
        yield "", f"held-out loss and samples: {gib(plan.measuring_bytes)} and activations"
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
    step = plan.step
    hbm = plan.where.chip.hbm_bytes
    text = f"{gib(step.arguments)} arguments"
    if not step.total:
        return f"{text}; the rest exceeds the {hbm / GIB:g} GiB per chip"
    if step.temporaries:
        text += f" + {gib(step.temporaries)} temporaries"
    words = verdict(hbm - step.total, fits=plan.step_fits)
    return f"{text}, {step.total / GIB:.2f} of {hbm / GIB:g} GiB per chip: {words}"


def _time(plan: TrainingPlan) -> str:
    seconds = plan.step_seconds
    hours = plan.hours
    if seconds is None or hours is None:
        return "unknown without a listed peak: name another GPU, such as --gpu L4"
    images = plan.recipe.train.global_batch_size
    speed = f"{images / seconds:,.1f} images/s ({plan.assumption})"
    whole = f"{plan.steps:,} steps in {hours_in_words(hours)}"
    text = f"{seconds:.3g} s per step, {speed}; {whole}"
    return text if plan.cost is None else f"{text}, cost {plan.cost:,.0f}"


def _storage(plan: TrainingPlan) -> str:
    latents = plan.latent_bytes
    captions = plan.caption_bytes
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
            f"{gib(plan.measuring_bytes, 1)} of the {plan.where.chip.hbm_bytes / GIB:g} GiB "
            f"of a chip of {plan.where.name}: set train.holdout_loss.every_n_steps and "
            "train.sample_every_n_steps to 0, or use chips with more memory"
        )
    needed = f"{gib(plan.step.total, 1)}" if plan.step.total else "more"
    text = (
        f"train.micro_batch_size={plan.batch.micro_batch_size} needs {needed} of the "
        f"{plan.where.chip.hbm_bytes / GIB:g} GiB of a chip of {plan.where.name}: "
    )
    if plan.largest is None:
        return text + "not even one picture per chip fits; raise train.fsdp or use more chips"
    largest = plan.largest.micro_batch_size
    return text + f"the largest that fits is train.micro_batch_size={largest}"
