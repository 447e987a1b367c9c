"""Print the memory, time, storage and cost of a recipe's training on a TPU slice or a GPU.

A machine without a shipped recipe's model prints the plan for a GPU that comes with the recipe.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from artifacts.store import Store
from configs.checks import Check, enter, note
from configs.errors import Away, Refused
from configs.settings.recipe import Recipe
from runtimes.torch_models.gpu_specs import GIB, Gpu, parse_gpu
from tasks.data_set import DataSet
from tasks.plan.gpu import TYPICAL_MFU, Advice, GpuPlan, RecipeMemory, memory_of, plan_for
from tasks.plan.plan import TrainingPlan, open_configs
from tasks.plan.tpu import SlicePlan, plan_slice_training
from tasks.preflight import Doors
from tasks.progress import bytes_in_words, gib, hours_in_words
from tasks.publish.promotion_gate import check_prompts


def gpu_facts(plan: GpuPlan | StoredPlan, parameters: int, checkpoint_bytes: int) -> dict[str, Any]:
    """Memory that every plan for a GPU knows.

    Args:
        parameters: number of trained parameters.
    """
    peaks = plan.peaks
    return {
        "gpu": plan.gpu.name,
        "gpus": plan.chips,
        "memory_gib": plan.gpu.memory / GIB,
        "usable_gib": plan.gpu.usable / GIB,
        "peak_gib": peaks.largest / GIB,
        "training_gib": peaks.training / GIB,
        "samples_gib": peaks.samples / GIB,
        "sampling_gib": peaks.sampling / GIB,
        "checkpointing_gib": peaks.checkpoint / GIB,
        "checkpoint_bytes": checkpoint_bytes,
        "parameters": parameters,
    }


def gpu_plan_facts(plan: GpuPlan) -> dict[str, Any]:
    """What a plan for a GPU has besides the facts of every plan; unknown values are null."""
    step = plan.step
    return gpu_facts(plan, step.parameters, plan.checkpoint_bytes) | {
        "training_parts_gib": {name: size / GIB for name, size in plan.peaks.parts.items()},
        "host_gib": plan.peaks.host / GIB,
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
    step = plan.step
    settings = plan.recipe.train
    yield "recipe", recipe_row(plan.recipe, step.parameters)
    count = "" if plan.chips == 1 else f"{plan.chips} times "
    yield "gpu", f"{count}{gpu_row(plan.gpu)}"
    micro = settings.micro_batch(settings.processes)
    yield "batch", f"{settings.global_batch_size} in micro-batches of {micro}"
    sizes = [(name.replace("_", " "), size) for name, size in plan.peaks.parts.items() if size]
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in sizes)
    yield from memory_rows(plan, plan.checkpoint_bytes, f": {parts}", plan.peaks.host)
    recomputed = step.recomputed_flops_per_image / 1e12
    more = f", and {recomputed:.4g} of recomputation" if recomputed else ""
    yield "work", f"{step.flops_per_image / 1e12:.4g} TFLOP per image{more}"
    if plan.largest_micro_batch is not None:
        yield "largest", f"train.micro_batch_size {plan.largest_micro_batch} fits"
    for advice in plan.advice:
        yield "advice", _advice(advice)


def recipe_row(recipe: Recipe, parameters: int, planned: str = "torch") -> str:
    other = "" if recipe.runtime == planned else f", planned for runtime {planned}"
    return f"{recipe.name}, {parameters / 1e6:,.1f} M trained parameters{other}"


def gpu_row(gpu: Gpu) -> str:
    return f"{gpu.name}: {gpu.memory / GIB:g} GiB, {gib(gpu.usable, 1)} of it for tensors"


def memory_rows(
    plan: GpuPlan | StoredPlan, checkpoint_bytes: int, parts: str = "", host: int = 0
) -> Iterator[tuple[str, str]]:
    """Rows of the peaks; the last is the verdict."""
    peaks = plan.peaks
    yield "training", f"{gib(peaks.training)} at the peak{parts}"
    if peaks.samples:
        yield "samples", f"{gib(peaks.samples)} while training draws samples"
    yield "sampling", f"{gib(peaks.sampling)} in the evaluation"
    if host:
        yield "host", f"{gib(host)} of the host's memory for offloaded weights"
    written = bytes_in_words(checkpoint_bytes)
    yield "saving", f"{gib(peaks.checkpoint)} while a checkpoint of {written} is written"
    usable = plan.gpu.usable
    spare = usable - peaks.largest
    yield "memory", f"{gib(peaks.largest)} of {gib(usable)}: {verdict(spare, fits=spare >= 0)}"


def verdict(spare: int, *, fits: bool) -> str:
    """What is spare, or too much."""
    return f"fits, {gib(spare, 1)} spare" if fits else f"{gib(max(-spare, 0), 1)} too much"


def _advice(advice: Advice) -> str:
    change = advice.flops_ratio - 1
    words = "equal FLOPs" if abs(change) < 0.005 else f"{change:+.0%} FLOPs"
    notes = "".join(f"; {note}" for note in advice.notes)
    return f"{advice.options}: {gib(advice.peak)}, {words}{notes}"


#: Facts of a GPU plan that need the model's configs.
UNKNOWN = (
    *("training_parts_gib", "flops_per_image", "recomputed_flops_per_image"),
    *("largest_micro_batch_size", "advice", "plan_seconds"),
)


@dataclass(frozen=True)
class StoredPlan:
    """A recipe's stored plan on a GPU."""

    recipe: Recipe
    gpu: Gpu
    peaks: RecipeMemory
    chips: ClassVar = 1
    #: What needs the model's configs.
    step_seconds: ClassVar = None
    bytes_per_picture: ClassVar = None
    caption_bytes: ClassVar = None
    storage_bytes: ClassVar = None

    @property
    def fits(self) -> bool:
        return self.peaks.fits(self.gpu.memory)

    @property
    def hours(self) -> float | None:
        return None if self.gpu.spec is None else self.peaks.hours(self.gpu.spec)

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
            f"{self.recipe.name} needs {gib(self.peaks.largest, 1)}, {self.gpu.name} has "
            f"{gib(self.gpu.usable, 1)} for tensors; with the hub's configs, `kiln plan` names "
            "the settings that fit"
        )


def stored_lines(plan: StoredPlan) -> Iterator[tuple[str, str]]:
    """Rows of the table, name and text."""
    yield "recipe", recipe_row(plan.recipe, plan.peaks.parameters)
    yield "gpu", gpu_row(plan.gpu)
    yield from memory_rows(plan, plan.peaks.checkpoint_bytes)
    work = plan.peaks.flops_per_image / 1e12
    yield "work", f"{work:.4g} TFLOP per image, with recomputation"
    hours = "unknown"
    if plan.hours is not None:
        hours = f"{hours_in_words(plan.hours)} ({plan.assumption})"
    yield "time", hours if plan.cost is None else f"{hours}, cost {plan.cost:,.0f}"


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
        try:
            memory = parse_gpu(gpu)
            on_gpu = plan_for(recipe, memory, open_configs(recipe.model), _say, search=search)
        except (Refused, Away) as error:
            if search:  # a stored plan knows the recipe's own batch
                raise
            _show_stored(recipe, parse_gpu(gpu), error, as_json=as_json)
            return
        show(on_gpu, gpu_plan_facts(on_gpu), lines(on_gpu), as_json=as_json)
        if not on_gpu.fits:
            raise Refused(on_gpu.refusal())


def _show_stored(recipe: Recipe, gpu: Gpu, error: Exception, *, as_json: bool) -> None:
    """Print the plan that comes with a recipe whose model is not there; raise the error if none."""
    if (memory := memory_of(recipe)) is None:
        raise error
    _say(f"{error}; this is the plan that comes with the recipe")
    plan = StoredPlan(recipe, gpu, memory)
    facts = dict.fromkeys(UNKNOWN) | gpu_facts(plan, memory.parameters, memory.checkpoint_bytes)
    show_rows(facts | shared_facts(plan), stored_lines(plan), as_json=as_json)
    if not plan.fits:
        raise Refused(plan.refusal())


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


def shared_facts(plan: TrainingPlan | StoredPlan) -> dict[str, Any]:
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
        return "unknown for a size of memory: name a GPU, such as --gpu L4"
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
