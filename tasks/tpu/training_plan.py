"""Plan training on a TPU slice without the slice: memory, FLOPs, time, storage and cost.

A separate process compiles the step (runtimes/jax/step_cost.py). The store caches the result by the
content of the request.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

from artifacts.commit import read_record, write_record
from artifacts.keys import digest_json
from artifacts.resolve_model import resolve_configs
from artifacts.store import Store
from configs.recipe import Recipe
from configs.train import Train
from runtimes.contract import WrongInput
from runtimes.jax.step_cost import Request, StepCost
from runtimes.pipeline_folder.describe_encoders import describe_encoders, read_config, vae_path
from runtimes.spmd.tpu_slices import TpuSlice, parse_slice

#: Increment when the compiled step or the values read from the compiler change.
VERSION = 3
#: Suffix of libtpu's folder, which is separate from our environment: inside it, libtpu would slow
#: every start of Python.
COMPILER = "-libtpu"
#: Assumed fraction of a chip's peak without a time estimate of the compiler; typical of good code.
TYPICAL_MFU = 0.4
#: Train settings that affect the compiled step.
STEP_SETTINGS = {
    *("method", "lora", "train_text_encoder", "inpainting", "aesthetic_score"),
    *("optimizer", "ema_decay", "max_grad_norm"),
    *("mixed_precision", "gradient_checkpointing", "compile", "fsdp"),
}
PACKAGES = ("jax", "jaxlib", "torch", "torchax", "diffusers", "transformers")


class PlanFailed(RuntimeError):
    """The compiler failed; the message has the last lines of its log."""


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
        """The batch with `count` samples per chip and forward pass, enlarged to one if smaller."""
        micro = count * self.where.chips // self.where.hosts
        return replace(self, micro_batch_size=micro, share=max(self.share, micro))


@dataclass(frozen=True)
class SlicePlan:
    """Memory, time, storage and cost of a recipe's training on a slice."""

    recipe: Recipe
    where: TpuSlice
    batch: Size
    step: StepCost
    info: dict[str, Any]  # of the encoders, from describe_encoders
    largest: Size | None = None  # the largest batch that fits; None if not searched or none fits

    @property
    def fits(self) -> bool:
        return _fits(self.step, self.where)

    @property
    def step_seconds(self) -> float | None:
        """Seconds per step on the slice; None without an estimate of time or FLOPs."""
        if self.step.optimal_seconds is not None:
            return self.step.optimal_seconds
        if self.step.flops_per_image is None:
            return None
        images = self.batch.per_chip * self.batch.micro_batches
        return self.step.flops_per_image * images / (self.where.chip.peak * TYPICAL_MFU)

    @property
    def assumption(self) -> str:
        """The assumption behind `step_seconds`."""
        if self.step.optimal_seconds is not None:
            return "as the compiler estimates its own program, batches always ready"
        return f"at {TYPICAL_MFU:.0%} of the chip's peak, batches always ready"

    @property
    def steps(self) -> int | None:
        """Steps of the run; None for `train.epochs` without `plan.pictures`."""
        train, pictures = self.recipe.train, self.recipe.plan.pictures
        if train.epochs is not None and pictures is None:
            return None
        return train.with_steps(pictures or 0).steps

    @property
    def hours(self) -> float | None:
        return self.step_seconds and self.steps and self.step_seconds * self.steps / 3600

    @property
    def cost(self) -> float | None:
        price = self.recipe.plan.chip_hour_price
        return None if price is None else self.hours and self.hours * self.where.chips * price

    @property
    def bytes_per_picture(self) -> int:
        """Stored bytes per picture: 16-bit moments, masks with masked means, one caption."""
        info, encode = self.info, self.recipe.encode
        pixels = (encode.resolution // info["vae_scale_factor"]) ** 2
        moments = 2 * 2 * info["latent_channels"] * pixels
        masked = encode.masks * (1 + 2 * info["latent_channels"]) * pixels
        pictures = (moments + masked) * (2 if encode.flip else 1)
        return pictures + 2 * (info["tokens"] * info["prompt_dim"] + (info["pooled_dim"] or 0))

    @property
    def storage_bytes(self) -> int | None:
        """Stored bytes of all pictures; None without `plan.pictures`."""
        pictures = self.recipe.plan.pictures
        return None if pictures is None else pictures * self.bytes_per_picture


def make_plan(
    recipe: Recipe, topology: str, *, search: bool, say: Callable[[str], None]
) -> SlicePlan:
    """Plan a recipe's training on a slice.

    Args:
        topology: accelerator type, such as v5p-8.
        search: search for the largest batch that fits, even if the recipe's fits.
        say: receives a message before each compilation, which takes minutes.

    Raises:
        ModelNotFound, WrongInput: the plan does not support the recipe or the slice.
        PlanFailed: the compiler failed.
    """
    where = parse_slice(topology)
    size = _size(recipe, where)
    model = resolve_configs(recipe.model.path, revision=recipe.model.revision)
    vae = None
    if recipe.model.vae is not None:
        vae = vae_path(model, resolve_configs(recipe.model.vae))
    measure = partial(_load_or_compile, recipe, model, vae, say)
    found = SlicePlan(recipe, where, size, measure(size), describe_encoders(model, vae))
    if found.fits and not search:
        return found
    return replace(found, largest=_largest(measure, size))


def _size(recipe: Recipe, where: TpuSlice) -> Size:
    """The recipe's batch, divided equally among the hosts of a slice."""
    settings = recipe.train
    if settings.global_batch_size % where.hosts:
        raise WrongInput(
            f"train.global_batch_size {settings.global_batch_size} is not divisible by the "
            f"{where.hosts} hosts of {where.name}: make it a multiple"
        )
    share = settings.global_batch_size // where.hosts
    return Size(min(settings.micro_batch_size or share, share), share, where)


def _load_or_compile(
    recipe: Recipe, model: Path, vae: Path | None, say: Callable[[str], None], batch: Size
) -> StepCost:
    """The cost of the recipe's step for a batch, from the store's cache if it is there."""
    config = recipe.train.denoiser_config
    request = Request(
        model=str(model),
        train=_of_the_step(recipe.train, batch),
        resolution=recipe.encode.resolution,
        topology=batch.where.name,
        vae=None if vae is None else str(vae),
        denoiser_config=None if config is None else read_config(Path(config)),
    )
    store = Store(recipe.store)
    path = f"{store.root}/plans/{_cache_key(request)}.json"
    try:
        record = read_record(store.fs, path)
    except ValueError:  # a damaged record is replaced
        record = None
    if record is None:
        say(
            f"compiling the step for {batch.where.name}, {batch.per_chip} pictures per chip and "
            "forward pass: minutes for a large model"
        )
        record = {"plan": asdict(_compile(request))}
        write_record(store.fs, path, record)
    return StepCost(**record["plan"])


def _cache_key(request: Request) -> str:
    """A digest of the request, the configs' contents and the package versions."""
    folders = [Path(folder) for folder in (request.model, request.vae) if folder is not None]
    configs = {
        f"{number}/{path.relative_to(folder)}": json.loads(path.read_text(encoding="utf-8"))
        for number, folder in enumerate(folders)
        for path in sorted([*folder.rglob("*config.json"), *folder.glob("model_index.json")])
    }
    versions = {name: version(name) for name in PACKAGES} | {"libtpu": compiler_version()}
    content = {**asdict(request), "model": None, "vae": None}
    return digest_json([VERSION, content, configs, versions])


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
    hbm, fitting, failing = start.where.chip.hbm_bytes, 0, 0
    guess, before = start.per_chip, (0, 0)  # next batch per chip; the previous one and its bytes
    while True:
        plan = measure(start.with_per_chip(guess))
        if _fits(plan, start.where):
            fitting = guess
        else:
            failing = guess
        if failing and failing - fitting == 1:
            return start.with_per_chip(fitting) if fitting else None
        low, high = fitting + 1, failing - 1 if failing else 8 * fitting
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
    return next((found.version for found in distributions(name="libtpu", path=path)), None)


def _compile(request: Request) -> StepCost:
    """Compile the step in a child process, since only that has libtpu on its path."""
    folder = compiler_folder()
    paths = [os.environ.get("PYTHONPATH", ""), "" if folder is None else str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with tempfile.TemporaryDirectory(prefix="kiln-plan-") as scratch:
        path = Path(scratch) / "request.json"
        path.write_text(json.dumps(asdict(request)), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "runtimes.jax.step_cost", str(path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        last = "\n".join(done.stderr.splitlines()[-20:])
        raise PlanFailed(f"the step could not be compiled (exit code {done.returncode}): {last}")
    found = json.loads(done.stdout.splitlines()[-1])
    if "wrong_input" in found:
        raise WrongInput(found["wrong_input"])
    return StepCost(**found)
