"""Plan training on a TPU slice without the slice: memory, FLOPs, time, storage and cost.

A separate process compiles the step (runtimes/jax/tpu_step_memory.py). The store caches the result
by the content of the request.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

from artifacts.store import Store
from configs.settings.recipe import Recipe
from configs.settings.train import Train
from runtimes.pipeline_folder.folder import Base, replacement_config
from runtimes.process.questions import StepCost, TpuStepRequest, ask
from runtimes.spmd.tpu_sharding import TpuSlice, check_training, parse_slice
from tasks.plan.plan import (
    Say,
    TrainingPlan,
    cache_key,
    load_or_compute,
    open_configs,
    planned_references,
)

#: Increment when the compiled step or the values read from the compiler change.
VERSION = 5
#: Suffix of libtpu's folder, which is separate from our environment: inside it, libtpu would slow
#: every start of Python.
COMPILER = "-libtpu"
#: Assumed fraction of a chip's peak without a time estimate of the compiler; typical of good code.
TYPICAL_MFU = 0.4
#: Assumed fraction of a chip's peak in attention kernels, whose FLOPs the compiler does not see.
KERNEL_MFU = 0.5
#: Train settings that affect the compiled step.
STEP_SETTINGS = Train.names_with("plan", "tpu")
#: Packages that compile the step.
STEP_PACKAGES = ("jax", "jaxlib", "torch", "torchax", "diffusers", "transformers")


@dataclass(frozen=True)
class Size:
    """The batch of a step, distributed over a slice."""

    micro_batch_size: int  # samples per host and forward pass
    share: int  # samples per host and step
    where: TpuSlice

    @property
    def per_chip(self) -> int:
        """Samples per chip and forward pass, padding included."""
        return -(-self.micro_batch_size * self.where.hosts // self.where.chips)

    @property
    def micro_batches(self) -> int:
        return -(-self.share // self.micro_batch_size)

    @property
    def global_batch_size(self) -> int:
        return self.share * self.where.hosts

    def with_per_chip(self, count: int) -> Size:
        """The batch with `count` samples per chip and forward pass, enlarged to 1 if smaller."""
        micro = count * self.where.chips // self.where.hosts
        return replace(self, micro_batch_size=micro, share=max(self.share, micro))


@dataclass(frozen=True)
class SlicePlan(TrainingPlan):
    """Memory, time, storage and cost of a recipe's training on a slice."""

    recipe: Recipe
    where: TpuSlice
    batch: Size
    step: StepCost
    info: Mapping[str, Any]  # of the encoders, `Base.encoders`
    largest: Size | None = None  # the largest batch that fits; None if not searched or none fits

    @property
    def fits(self) -> bool:
        return self.step_fits and self.measuring_bytes <= self.where.chip.hbm_bytes

    @property
    def step_fits(self) -> bool:
        return _fits(self.step, self.where)

    @property
    def measuring_bytes(self) -> int:
        """Least bytes per chip of held-out loss and samples during training; 0 without them.

        Runtime jax gathers the whole model for them, beside the state. Activations are not counted.
        """
        settings = self.recipe.train
        measures = settings.holdout_loss.every_n_steps or settings.sample_every_n_steps
        if self.recipe.runtime != "jax" or not measures:
            return 0
        itemsize = 4 if settings.compute_dtype == "float32" else 2
        return self.step.arguments + self.step.parameters * itemsize

    @property
    def chips(self) -> int:
        return self.where.chips

    @property
    def step_seconds(self) -> float | None:
        """Seconds per step on the slice; None without an estimate of time or FLOPs."""
        if self.step.optimal_seconds is not None:
            kernels = self.step.kernel_flops / (KERNEL_MFU * self.where.chip.peak)
            return self.step.optimal_seconds + kernels
        if self.step.flops_per_image is None:
            return None
        images = self.batch.per_chip * self.batch.micro_batches
        return self.step.flops_per_image * images / (self.where.chip.peak * TYPICAL_MFU)

    @property
    def assumption(self) -> str:
        """The assumption behind `step_seconds`."""
        if self.step.optimal_seconds is not None:
            kernels = f", attention kernels at {KERNEL_MFU:.0%} of the chip's peak"
            shown = kernels if self.step.kernel_flops else ""
            return f"as the compiler estimates its own program{shown}, batches always ready"
        return f"at {TYPICAL_MFU:.0%} of the chip's peak, batches always ready"


def plan_slice_training(recipe: Recipe, topology: str, *, search: bool, say: Say) -> SlicePlan:
    """Plan a recipe's training on a slice.

    Args:
        topology: accelerator type, such as v5p-8.
        search: search for the largest batch that fits, even if the recipe's fits.

    Raises:
        Refused: the plan does not support the recipe or the slice.
        Unanswered: the compiler failed.
    """
    where = parse_slice(topology)
    size = _size(recipe.train, where)
    base = open_configs(recipe)
    measure = partial(_load_or_compile, recipe, base, say)
    plan = SlicePlan(recipe, where, size, measure(size), base.encoders)
    if plan.step_fits and not search:
        return plan
    return replace(plan, largest=_largest(measure, size))


def _size(settings: Train, where: TpuSlice) -> Size:
    """The batch, divided equally among the hosts of a slice."""
    check_training(where, settings)
    share = settings.global_batch_size // where.hosts
    return Size(settings.micro_batch(where.hosts), share, where)


def _load_or_compile(recipe: Recipe, base: Base, say: Say, batch: Size) -> StepCost:
    """The cost of the recipe's step for a batch, from the store's cache if it is there."""
    request = TpuStepRequest(
        **base.job_fields,
        train=_of_the_step(recipe.train, batch),
        resolution=recipe.largest_resolution,
        topology=batch.where.name,
        denoiser_config=replacement_config(recipe.train),
        text_dtype=recipe.encode.text_dtype,
        has_prior=recipe.has_prior,
        references=planned_references(recipe),
    )

    def compile_step() -> dict[str, Any]:
        say(
            f"compiling the step for {batch.where.name}, {batch.per_chip} pictures per chip and "
            "forward pass: minutes for a large model"
        )
        folder = compiler_folder()
        paths = [os.environ.get("PYTHONPATH", ""), "" if folder is None else str(folder)]
        # Only the child process has libtpu on its path.
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        text = json.dumps(asdict(request))
        return ask("-m", "runtimes.jax.tpu_step_memory", text, environment=environment)

    versions = {name: version(name) for name in STEP_PACKAGES} | {"libtpu": compiler_version()}
    key = cache_key(VERSION, request, versions)
    return StepCost(**load_or_compute(Store(recipe.store), key, compile_step))


def _of_the_step(train: Train, size: Size) -> dict[str, Any]:
    """The train settings that affect the compiled step, with the batch of `size`."""
    settings = train.model_dump(mode="json", include=STEP_SETTINGS)
    # The decay's value is an argument of the compiled step: see runtimes/jax/step.py.
    settings["ema_decay"] = None if train.ema_decay is None else 0.0
    batch = {"micro_batch_size": size.micro_batch_size, "global_batch_size": size.global_batch_size}
    return settings | batch


def _largest(measure: Callable[[Size], StepCost], start: Size) -> Size | None:
    """The largest batch that fits; None if one picture per chip does not fit.

    A secant search: memory is assumed linear in the batch, and each guess is compiled, until the
    largest batch that fits and the smallest that fails are adjacent.
    """
    hbm = start.where.chip.hbm_bytes
    fitting = 0
    failing = 0
    guess = start.per_chip
    before = (0, 0)  # next batch per chip; the previous batch and its bytes
    while True:
        plan = measure(start.with_per_chip(guess))
        if _fits(plan, start.where):
            fitting = guess
        else:
            failing = guess
        if failing and failing - fitting == 1:
            return start.with_per_chip(fitting) if fitting else None
        low = fitting + 1
        high = failing - 1 if failing else 8 * fitting
        if plan.fits or plan.total > hbm:  # otherwise the excess is unknown, so bisect
            count, held = before if before[1] else (0, plan.arguments)
            slope = max((plan.total - held) / (guess - count), 1.0)
            following = int(guess + (hbm - plan.total) // slope)
            before = (guess, plan.total)
        else:
            following = (low + high) // 2
        guess = min(max(following, low), high)


def _fits(plan: StepCost, where: TpuSlice) -> bool:
    return plan.fits and plan.total <= where.chip.hbm_bytes


def compiler_folder() -> Path | None:
    """libtpu's folder; None if it is not installed there."""
    folder = Path(sys.prefix + COMPILER)
    return folder if (folder / "libtpu").is_dir() else None


def compiler_version() -> str | None:
    """libtpu's version; None if it is not installed."""
    folder = compiler_folder()
    path = sys.path if folder is None else [str(folder)]
    return next((package.version for package in distributions(name="libtpu", path=path)), None)
