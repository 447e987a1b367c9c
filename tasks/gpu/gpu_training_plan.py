"""Plan training on a GPU without the GPU: peak memory, what would make it fit, time and cost.

Separate processes run the step on fake tensors (runtimes/torch/gpu_plan.py). The store
caches their results by the content of the requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.settings.recipe import Recipe
from runtimes.contract import WrongInput
from runtimes.families import detect_family
from runtimes.pipeline_folder.folder import describe_encoders
from runtimes.process.planner import StepMemory
from runtimes.torch_models.gpu_specs import GIB, Gpu, parse_gpu
from tasks.base_training_plan import PlanFailed, TrainingPlan, config_folders
from tasks.gpu.advice import Advice, advise
from tasks.gpu.estimate_peak_memory import Peaks, Planner, executed_flops

#: Share of a GPU's memory for tensors. The rest is the CUDA context, workspaces of kernels and
#: fragmentation of the allocator; drivers also report up to 8% less than data sheets.
USABLE = 0.92
#: Assumed share of a GPU's peak FLOP/s, about that of SD2 without torch.compile on an H100.
TYPICAL_MFU = 0.2
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
    info: dict[str, Any]  # of the encoders, from describe_encoders
    seconds: float  # duration of the plan, without cached parts
    largest_micro_batch: int | None = None  # the largest that fits; None if none does
    advice: tuple[Advice, ...] = ()  # the first costs least; empty if the recipe fits

    @property
    def usable(self) -> int:
        """Bytes of the GPU's memory for tensors."""
        return int(USABLE * self.gpu.memory)

    @property
    def fits(self) -> bool:
        return self.peaks.largest <= self.usable

    @property
    def least_training(self) -> int:
        """Bytes that training needs at least, if compiled blocks save most activations."""
        parts = dict(self.peaks.training)
        if self.recipe.train.compile != "none":
            for name in ("activations", "temporaries"):
                parts[name] = int(parts[name] * COMPILED)
        return sum(parts.values())

    @property
    def chips(self) -> int:
        return self.recipe.train.processes

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint on disk: weights, moments and average of trained arrays.

        It holds each value in four bytes, those of 8-bit moments too.
        """
        weights, average = 4 * self.step.parameters, self.recipe.train.ema_decay is not None
        return weights + self.step.optimizer + weights * average

    @property
    def step_seconds(self) -> float | None:
        """Seconds per step at TYPICAL_MFU; None if the GPU's peak is unknown."""
        spec = self.gpu.spec
        peak = None if spec is None else spec.peak(self.recipe.train.product_dtype)
        if peak is None:
            return None
        images = self.recipe.train.global_batch_size / self.chips
        return images * executed_flops(self.step) / (peak * TYPICAL_MFU)

    @property
    def assumption(self) -> str:
        """The assumption behind `step_seconds`."""
        return f"at {TYPICAL_MFU:.0%} of the GPU's peak, batches always ready"

    def refusal(self) -> str:
        """The error of a recipe that does not fit."""
        text = (
            f"{self.recipe.name} needs {self.peaks.largest / GIB:.1f} GiB, {self.gpu.name} has "
            f"{self.usable / GIB:.1f} GiB for tensors: "
        )
        if not self.advice:
            trains = sum(self.peaks.training.values()) <= self.usable
            smaller = "evaluate.height and evaluate.width" if trains else "encode.resolution"
            return text + f"no settings known here make it fit; lower {smaller}"
        return text + f"it fits with {self.advice[0].options}"


def plan_gpu_training(
    recipe: Recipe, gpu: str, *, search: bool, say: Callable[[str], None]
) -> GpuPlan:
    """Plan a recipe's training on a GPU, by runtime torch.

    Args:
        gpu: memory, such as 24GB, or name, such as H100.
        search: search for the largest micro-batch beyond the recipe's global batch size.
        say: receives a message before each computation, which takes seconds to a minute.

    Raises:
        ModelNotFound, WrongInput: the plan does not support the recipe or the GPU.
        PlanFailed: the planner failed.
    """
    there = parse_gpu(gpu)
    model, vae = config_folders(recipe)
    return plan_for(recipe, there, model, vae, say, search=search)


def plan_for(
    recipe: Recipe,
    gpu: Gpu,
    model: Path,
    vae: Path | None,
    say: Callable[[str], None] = log.info,
    *,
    search: bool = False,
) -> GpuPlan:
    """`plan_gpu_training` for local folders; their configs are enough."""
    if recipe.train.fsdp != 1 and recipe.train.processes > 1:
        raise WrongInput("train.fsdp: a GPU plan knows unsharded weights only: set 1")
    planner = Planner(recipe, model, vae, say)
    planner.compute(planner.requests(recipe))
    peaks, step = planner.peaks(recipe), planner.step(recipe.train)
    info = describe_encoders(model, vae)
    plan = GpuPlan(recipe, gpu, step, peaks, info, planner.seconds)
    largest = planner.largest_micro_batch(recipe, plan.usable, enlarges=search)
    advice = () if plan.fits else tuple(advise(planner, recipe, plan.usable))
    return replace(plan, largest_micro_batch=largest, advice=advice, seconds=planner.seconds)


def check_fits(
    recipe: Recipe,
    model: Path,
    vae: Path | None,
    memory: int,
    host: int | None,
    *,
    small: int = SMALL,
) -> None:
    """Raise WrongInput for a recipe that cannot train or be evaluated on a GPU.

    A recipe that may fit is accepted, with a warning if the plan says that it does not. A model
    that is small beside the memory is not planned, since that costs seconds to a minute.

    Args:
        model: local folder of the base pipeline.
        vae: folder of the VAE that replaces the pipeline's own.
        memory: of the GPU, in bytes, as its driver reports it.
        host: bytes of the host's memory; None: this host evaluates nothing.
        small: how many times the stored weights the memory of a GPU is for a small model.
    """
    denoiser = model / detect_family(model).denoiser
    stored = sum(path.stat().st_size for path in denoiser.glob("*.safetensors"))
    if 0 < small * stored < memory:
        return
    try:
        plan = plan_for(recipe, Gpu("this GPU", memory), model, vae)
    except PlanFailed as error:
        log.warning("the memory of training is unknown: %s", error)
        return
    if plan.least_training > memory:
        raise WrongInput(plan.refusal())
    if host is not None and plan.peaks.host > host:
        raise WrongInput(
            f"evaluate.offload keeps {plan.peaks.host / GIB:.1f} GiB of weights in the host's "
            f"memory, which has {host / GIB:.1f} GiB: set false, or use a larger host"
        )
    if not plan.fits:
        log.warning("training may run out of memory: %s", plan.refusal())
