"""Plan training on a GPU without the GPU: peak memory, what would make it fit, time and cost."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from configs.errors import Refused
from configs.settings.recipe import Recipe
from runtimes.detect_hardware import PINNED
from runtimes.pipeline_folder.folder import Base
from runtimes.process.questions import StepMemory, Unanswered
from runtimes.torch_models.gpu_specs import Gpu
from tasks.plan.across_hosts import Crossing, crossing, gathered_bytes
from tasks.plan.gpu_advice import Advice, advise, fewest_blocks
from tasks.plan.gpu_memory import Peaks, Planner, with_settings
from tasks.plan.gpu_time import TYPICAL_MFU, step_seconds
from tasks.plan.plan import Say, TrainingPlan, checkpoint_bytes
from tasks.progress import gib

#: Compiled blocks need at least this share of the planned activations (SD2 on an H100: 0.77).
COMPILED = 0.5
#: A model is small if the memory is this many times its stored weights: a 16-bit weight has up to
#: 20 bytes of state, and the activations of large batches are up to ten times the state.
SMALL = 100
log = logging.getLogger("kiln")


@dataclass(frozen=True)
class GpuPlan(TrainingPlan):
    """Memory, time and cost of a recipe's training on a GPU, or on several by data parallelism."""

    recipe: Recipe
    gpu: Gpu
    step: StepMemory
    peaks: Peaks
    info: Mapping[str, Any]  # of the encoders, `Base.encoders`
    seconds: float  # duration of the plan, without cached parts
    largest_micro_batch: int | None = None  # the largest that fits; None if none does
    advice: tuple[Advice, ...] = ()  # the first costs least; empty if the recipe fits

    @property
    def fits(self) -> bool:
        return self.peaks.largest <= self.gpu.usable

    @property
    def least_training(self) -> int:
        """Bytes that training needs at least, if compiled blocks save most activations."""
        parts = dict(self.peaks.parts)
        if self.recipe.train.compile != "none":
            parts |= {n: int(parts[n] * COMPILED) for n in ("activations", "temporaries")}
        return sum(parts.values())

    @property
    def chips(self) -> int:
        return self.recipe.train.world_size

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint on disk."""
        return checkpoint_bytes(self.recipe.train, self.step.parameters, self.step.optimizer)

    @property
    def computing_seconds(self) -> float | None:
        """Seconds of computation per step at TYPICAL_MFU; None if the GPU's peak is unknown."""
        spec = self.gpu.spec
        return None if spec is None else step_seconds(self.recipe.train, self.step, spec)

    @cached_property
    def crossing(self) -> Crossing:
        """What a host sends to others per step."""
        train = self.recipe.train
        numbers = self.step.parameters
        return crossing(train, numbers, gathered_bytes(train, numbers, self.step.weights))

    @property
    def crossing_seconds(self) -> float:
        """Seconds per step in which hosts exchange gradients and weights."""
        return self.crossing.seconds(self.recipe.plan.network_gbits)

    @property
    def step_seconds(self) -> float | None:
        """Seconds per step, without overlap of computation and network; None if unknown."""
        seconds = self.computing_seconds
        return None if seconds is None else seconds + self.crossing_seconds

    @property
    def assumption(self) -> str:
        """The assumption behind `step_seconds`."""
        text = f"at {TYPICAL_MFU:.0%} of the GPU's peak, batches always ready"
        return text if self.recipe.train.hosts == 1 else f"{text}, nothing overlaps the network"

    def refusal(self) -> str:
        """The error of a recipe that does not fit."""
        text = (
            f"{self.recipe.name} needs {gib(self.peaks.largest, 1)}, {self.gpu.name} has "
            f"{gib(self.gpu.usable, 1)} for tensors: "
        )
        if not self.advice:
            trains = self.peaks.training <= self.gpu.usable
            smaller = "evaluate.height and evaluate.width" if trains else "encode.resolution"
            return text + f"no settings known here make it fit; lower {smaller}"
        return text + f"it fits with {self.advice[0].options}"


def plan_for(
    recipe: Recipe, gpu: Gpu, base: Base, say: Say = log.info, *, search: bool = False
) -> GpuPlan:
    """Plan a recipe's training on a GPU, by runtime torch.

    The plan's recipe has a number instead of `train.stream_blocks: auto`.

    Args:
        base: opened; its configs are enough.
        search: search for the largest micro-batch beyond the recipe's global batch size.

    Raises:
        Refused: the plan does not support the recipe.
        Unanswered: the planner failed.
    """
    group = recipe.train.shard_group
    if recipe.train.world_size % group:
        words = f"{group} does not divide {recipe.train.world_size} processes"
        raise Refused(words, setting="train.fsdp")
    planner = Planner(recipe, base, say)
    if recipe.train.stream_blocks == "auto":
        count = fewest_blocks(planner, recipe.evaluate, recipe.train, gpu.usable)
        if count is None:
            none = with_settings(recipe.train, {"stream_blocks": 0})
            count = len(planner.step(none).streaming) - 1
        say(f"train.stream_blocks: auto on {gpu.name}: {count}")
        recipe = planner.recipe = with_settings(recipe, {"train.stream_blocks": count})
    planner.compute(planner.requests())
    about = (recipe.train, recipe.evaluate)
    peaks = planner.peaks(*about)
    step = planner.step(recipe.train)
    plan = GpuPlan(recipe, gpu, step, peaks, base.encoders, planner.seconds)
    largest = planner.largest_micro_batch(*about, gpu.usable, enlarges=search)
    advice = () if plan.fits else tuple(advise(planner, gpu))
    return replace(plan, largest_micro_batch=largest, advice=advice, seconds=planner.seconds)


def check_fits(
    recipe: Recipe, base: Base, memory: int, host: int | None, *, small: int = SMALL
) -> None:
    """Raise Refused for a recipe that cannot train or be evaluated on a GPU.

    A recipe that may fit is accepted, with a warning if the plan says that it does not. A model
    that is small beside the memory is not planned, since that costs seconds to a minute.

    Args:
        memory: memory of the GPU, in bytes, as its driver reports it.
        host: bytes of the host's memory; None: this host evaluates nothing.
        small: how many times the stored weights the memory of a GPU is for a small model.
    """
    weights = base.denoiser_folder.glob("*.safetensors")
    stored = sum(path.stat().st_size for path in weights)
    if 0 < small * stored < memory:
        return
    try:
        plan = plan_for(recipe, Gpu("this GPU", memory), base)
    except Unanswered as error:
        log.warning("the memory of training is unknown: %s", error)
        return
    if plan.least_training > memory:
        raise Refused(plan.refusal())
    if host is not None and plan.step.streamed > host:
        raise Refused(
            f"train.stream_blocks pins {gib(plan.step.streamed, 1)} of the host's memory, which "
            f"has {gib(host, 1)}: lower it, or use a larger host"
        )
    if host is not None and plan.peaks.host > PINNED * host:
        log.warning(
            "%s of offloaded weights are more than a host with %s can pin: each pass reads the "
            "rest from the files, which is slower",
            *(gib(plan.peaks.host, 1), gib(host, 1)),
        )
    if not plan.fits:
        log.warning("training may run out of memory: %s", plan.refusal())
