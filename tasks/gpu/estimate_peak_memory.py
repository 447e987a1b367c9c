"""Peak memory of a recipe and its variants on a GPU, from steps on fake tensors."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from artifacts.store import Store
from configs.settings.recipe import Recipe
from configs.settings.train import Train
from runtimes.contract import WrongInput
from runtimes.families import detect_family
from runtimes.pipeline_folder.folder import (
    describe_encoders,
    read_part_config,
    replacement_config,
    trained_config,
)
from runtimes.process.planner import GpuStepRequest, StepMemory
from runtimes.sample.initial_noise import image_size
from tasks.base_training_plan import ask_planner, cache_key, load_or_compute
from tasks.evaluate.prompts import sample_prompts

#: Increment when the recorded step or the meaning of its bytes changes.
VERSION = 2
PROCESSES = 2  # planners at once
LARGEST = 2**20  # micro-batch of a search
#: Train settings that affect the recorded step.
STEP_SETTINGS = {
    *("method", "lora", "train_text_encoder", "inpainting", "aesthetic_score"),
    *("init", "denoiser_config", "optimizer", "max_grad_norm"),
    *("mixed_precision", "gradient_checkpointing"),
}
#: Packages that record the step.
STEP_PACKAGES = ("torch", "diffusers", "transformers", "peft")


@dataclass(frozen=True)
class Peaks:
    """Peak memory in bytes of what a run does on the GPU."""

    training: dict[str, int]  # by part
    sampling: int  # of the evaluation, in a process of its own
    samples: int  # pictures drawn during training; 0: none are drawn
    checkpoint: int
    host: int  # of the host's memory, for offloaded weights of the evaluation

    @property
    def largest(self) -> int:
        return max(sum(self.training.values()), self.sampling, self.samples, self.checkpoint)


class Planner:
    """Computes and keeps the memory of the steps that variants of a recipe need.

    Args:
        say: receives a message before each computation, which takes seconds to a minute.
    """

    def __init__(
        self, recipe: Recipe, model: Path, vae: Path | None, say: Callable[[str], None]
    ) -> None:
        self._recipe, self._model, self._vae, self._say = recipe, model, vae, say
        self._found: dict[str, StepMemory] = {}
        self.seconds = 0.0

    def compute(self, requests: Sequence[GpuStepRequest]) -> None:
        """Compute several requests at once."""
        lacking = {repr(request): request for request in requests}
        lacking = {name: r for name, r in lacking.items() if name not in self._found}
        with ThreadPoolExecutor(PROCESSES) as pool:
            self._found |= zip(lacking, pool.map(self._load, lacking.values()), strict=True)

    def _load(self, request: GpuStepRequest) -> StepMemory:
        def compute() -> dict[str, Any]:
            dtype = request.sampling_dtype
            what = "a training step" if dtype is None else f"drawing pictures in {dtype}"
            self._say(f"computing the memory of {what}: seconds to a minute")
            found = ask_planner("runtimes.torch.gpu_plan", asdict(request))
            self.seconds += found["seconds"]
            return found

        versions = {name: version(name) for name in STEP_PACKAGES}
        key = cache_key(VERSION, request, versions)
        return StepMemory.from_json(load_or_compute(Store(self._recipe.store), key, compute))

    def requests(self, recipe: Recipe) -> list[GpuStepRequest]:
        """All that `peaks` needs."""
        sampling = [self._sampling(recipe.evaluate.dtype)]
        if recipe.train.sample_every_n_steps:
            sampling.append(self._sampling(recipe.train.compute_dtype))
        return [self.training_request(recipe.train), *sampling]

    def permits(self, train: Train) -> bool:
        """Whether the base can be trained so: adapters add no inputs to a denoiser."""
        config = read_part_config(self._model, detect_family(self._model).denoiser)
        try:
            trained_config(config, train, replacement_config(train))
        except WrongInput:
            return False
        return True

    def training_request(self, train: Train) -> GpuStepRequest:
        optimizer = "adamw" if train.optimizer == "adamw_8bit" else train.optimizer
        settings = train.model_dump(mode="json", include=STEP_SETTINGS) | {"optimizer": optimizer}
        if train.gradient_checkpointing == "selective" and train.compile != "none":
            settings["gradient_checkpointing"] = "none"  # as compile_denoiser does
        return self._request(settings)

    def _sampling(self, dtype: str) -> GpuStepRequest:
        names = {"inpainting", "aesthetic_score", "init", "denoiser_config"}
        settings = self._recipe.train.model_dump(mode="json", include=names)
        size = self._drawn_size()
        return replace(self._request(settings), sampling_dtype=dtype, drawn_size=size)

    def _drawn_size(self) -> tuple[int, int]:
        """(height, width) of the pictures that training and evaluation draw, in pixels."""
        family = detect_family(self._model)
        denoiser = read_part_config(self._model, family.denoiser)
        scale = describe_encoders(self._model, self._vae)["vae_scale_factor"]
        asked = self._recipe.evaluate.model_dump(include={"height", "width"})
        return image_size(asked, family, denoiser, scale)

    def _request(self, train: dict[str, Any]) -> GpuStepRequest:
        return GpuStepRequest(
            model=str(self._model),
            train=train,
            resolution=self._recipe.encode.resolution,
            vae=None if self._vae is None else str(self._vae),
            denoiser_config=replacement_config(self._recipe.train),
            text_dtype=self._recipe.encode.text_dtype,
        )

    def step(self, train: Train) -> StepMemory:
        return self._get(self.training_request(train))

    def _get(self, request: GpuStepRequest) -> StepMemory:
        self.compute([request])
        return self._found[repr(request)]

    def peaks(self, recipe: Recipe) -> Peaks:
        """Peak memory of a variant of the recipe."""
        settings, step = recipe.train, self.step(recipe.train)
        average = 0 if settings.ema_decay is None else step.ema
        state = {
            "weights": step.weights,
            "optimizer": optimizer_bytes(step, settings),
            "ema": average,
        }
        samples, several = micro_batch(settings)
        held = sum(state.values())
        drawn = 0
        if settings.sample_every_n_steps:
            batch = min(recipe.evaluate.batch_size, len(sample_prompts(recipe)))
            within = self._get(self._sampling(settings.compute_dtype)).peak(batch)
            # Autocast keeps a copy of each trained weight until all pictures are drawn.
            casts = 0 if settings.compute_dtype == "float32" else 2 * step.parameters
            drawn = held + casts + step.encoders + sum(within.values())
        evaluated = self._get(self._sampling(recipe.evaluate.dtype))
        weights = evaluated.offloaded if recipe.evaluate.offload else evaluated.weights
        return Peaks(
            training=state | step.peak(samples, accumulating=several),
            sampling=weights + sum(evaluated.peak(recipe.evaluate.batch_size).values()),
            samples=drawn,
            checkpoint=held + step.largest,  # one array at a time is copied to the host
            host=evaluated.weights if recipe.evaluate.offload else 0,
        )

    def largest_micro_batch(
        self, recipe: Recipe, usable: int, most: int = 4096, *, enlarges: bool = False
    ) -> int | None:
        """The largest micro-batch that fits, of those that the global batch size permits.

        Args:
            enlarges: whether the global batch size may grow to one micro-batch per GPU.
        """
        settings = recipe.train
        share = settings.global_batch_size // settings.processes

        def exceeds(size: int) -> bool:
            batch = max(settings.global_batch_size, size * settings.processes)
            sizes = {"micro_batch_size": size, "global_batch_size": batch}
            return self.peaks(with_train(recipe, sizes)).largest > usable

        if enlarges and not exceeds(share):
            return bisect(range(share, LARGEST + 1), False, key=exceeds) + share - 1
        sizes = (size for size in range(min(share, most), 0, -1) if not exceeds(size))
        return next(sizes, None)


def with_train(recipe: Recipe, settings: dict[str, Any]) -> Recipe:
    """The recipe with other train settings; names of nested ones are dotted."""
    train = recipe.train
    for name, value in settings.items():
        section, _, nested = name.rpartition(".")
        if section:
            value = getattr(train, section).model_copy(update={nested: value})
        train = train.model_copy(update={section or name: value})
    return recipe.model_copy(update={"train": train})


def micro_batch(settings: Train) -> tuple[int, bool]:
    """Samples per micro-batch and GPU, and whether gradients exist before the last one.

    DistributedDataParallel keeps its buckets of gradients, too.
    """
    size = settings.micro_batch(settings.processes)
    share = settings.global_batch_size // settings.processes
    return size, size < share or settings.processes > 1


def optimizer_bytes(step: StepMemory, settings: Train) -> int:
    """Bytes of the optimizer's state."""
    return step.optimizer_8bit if settings.optimizer == "adamw_8bit" else step.optimizer


def executed_flops(step: StepMemory) -> float:
    """FLOPs per image, with recomputation."""
    return step.flops_per_image + step.recomputed_flops_per_image
