"""Peak memory of a recipe's training and sampling on a GPU, without the GPU.

Separate processes run the step of a recipe and its variants on fake tensors
(runtimes/torch/gpu_step_memory.py). The store caches their results by the content of the requests.
"""

from __future__ import annotations

import json
from bisect import bisect
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any

from artifacts.store import Store
from configs.errors import Refused
from configs.settings.data import Encode
from configs.settings.evaluate import Evaluate
from configs.settings.recipe import AnySection, Recipe
from configs.settings.train import Train
from runtimes.pipeline_folder.folder import TEXT_BATCH, Base, replacement_config, trained_config
from runtimes.process.questions import GpuStepRequest, StepMemory, ask
from runtimes.sample.sampling_inputs import image_size
from tasks.evaluate.metrics import sample_prompts
from tasks.plan.across_hosts import gathered_bytes
from tasks.plan.plan import Say, cache_key, load_or_compute, planned_references
from tasks.train import control_start

#: Increment when the recorded step or the meaning of its bytes changes.
VERSION = 4
PROCESSES = 2  # planners at once
LARGEST = 2**20  # micro-batch of a search
#: Train settings that affect the recorded step.
STEP_SETTINGS = Train.names_with("plan", "gpu")
#: Packages that record the step.
STEP_PACKAGES = ("torch", "diffusers", "transformers", "peft")


@dataclass(frozen=True)
class Peaks:
    """Peak memory in bytes of what a run does on the GPU."""

    parts: dict[str, int]  # of training
    sampling: int  # of the evaluation, in a process of its own
    samples: int  # pictures drawn during training; 0: none are drawn
    encoding: int  # of the encode stage, in a process of its own
    checkpoint: int
    host: int  # of the host's memory, for streamed or offloaded weights of one process

    @property
    def training(self) -> int:
        return sum(self.parts.values())

    @property
    def largest(self) -> int:
        return max(self.training, self.sampling, self.samples, self.encoding, self.checkpoint)


class Planner:
    """Computes and keeps the memory of the steps that variants of a recipe need."""

    def __init__(self, recipe: Recipe, base: Base, say: Say) -> None:
        self.recipe = recipe
        self._base = base
        self._say = say
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
            what = "a training step"
            if request.sampling_dtype is not None:
                what = f"drawing pictures in {request.sampling_dtype}"
            if request.encoding_dtype is not None:
                what = f"encoding in {request.encoding_dtype}"
            self._say(f"computing the memory of {what}: seconds to a minute")
            answer = ask("-m", "runtimes.torch.gpu_step_memory", json.dumps(asdict(request)))
            self.seconds += answer["seconds"]
            return answer

        versions = {name: version(name) for name in STEP_PACKAGES}
        key = cache_key(VERSION, request, versions)
        return StepMemory.from_json(load_or_compute(Store(self.recipe.store), key, compute))

    def requests(self) -> list[GpuStepRequest]:
        """All that `peaks` of the recipe needs."""
        train = self.recipe.train
        encode = self.recipe.encode
        dtypes: list[str] = [self.recipe.evaluate.dtype]
        if train.sample_every_n_steps:
            dtypes.append(train.compute_dtype)
        drawing = [request for dtype in dtypes for request in self._drawing(dtype)]
        encoding = self._encoding(encode.dtype, encode.text_precision)
        return [self.training_request(train), encoding, *drawing]

    def permits(self, train: Train) -> bool:
        """Whether the base can be trained so: adapters add no inputs to a denoiser."""
        try:
            trained_config(self._base.denoiser, train, replacement_config(train))
        except Refused:
            return False
        return True

    def training_request(self, train: Train) -> GpuStepRequest:
        optimizer = train.optimizer.removesuffix("_8bit")
        settings = train.model_dump(mode="json", include=STEP_SETTINGS) | {"optimizer": optimizer}
        settings |= self._control(train)
        if train.gradient_checkpointing == "selective" and train.compile != "none":
            settings["gradient_checkpointing"] = "none"  # as compile_denoiser does
        return replace(self._request(settings), has_prior=self.recipe.has_prior)

    def _sampling(self, dtype: str) -> GpuStepRequest:
        names = {"inpainting", "aesthetic_score", "init", "denoiser_config"}
        settings = self.recipe.train.model_dump(mode="json", include=names)
        settings |= self._control(self.recipe.train)
        base = self._base
        scale = base.encoders["vae_scale_factor"]
        asked = self.recipe.evaluate.model_dump(include={"height", "width"})
        size = image_size(asked, base.family, base.denoiser, scale)
        return replace(self._request(settings), sampling_dtype=dtype, drawn_size=size)

    def _control(self, train: Train) -> dict[str, Any]:
        """The settings of the ControlNet, if there is one: other requests keep their keys."""
        names = {"method", "controlnet"} if train.method == "controlnet" else set()
        return train.model_dump(mode="json", include=names)

    def _encoding(self, dtype: str, text_precision: str | None = None) -> GpuStepRequest:
        request = replace(self._request({}), denoiser_config=None, text_dtype=None)
        return replace(request, encoding_dtype=dtype, text_precision=text_precision)

    def _drawing(self, dtype: str) -> tuple[GpuStepRequest, GpuStepRequest]:
        """The prompts, whose text encoders have full precision; then the pictures."""
        return self._encoding(dtype), self._sampling(dtype)

    def _request(self, train: dict[str, Any]) -> GpuStepRequest:
        start = control_start(self.recipe.train)
        return GpuStepRequest(
            **self._base.job_fields,
            train=train,
            resolution=self.recipe.largest_resolution,
            denoiser_config=replacement_config(self.recipe.train),
            text_dtype=self.recipe.encode.text_dtype,
            references=planned_references(self.recipe),
            control_start=None if start is None else str(start),
        )

    def step(self, train: Train) -> StepMemory:
        step = self._get(self.training_request(train))
        return step.with_streamed(train.streamed_blocks)

    def _get(self, request: GpuStepRequest) -> StepMemory:
        self.compute([request])
        return self._found[repr(request)]

    def peaks(self, train: Train, evaluate: Evaluate, encode: Encode | None = None) -> Peaks:
        """Peak memory of a variant of the recipe; `encode` is the recipe's if it is None."""
        encode = encode or self.recipe.encode
        step = self.step(train)
        if train.shard_group > 1:
            gathered = gathered_bytes(train, step.parameters, step.weights)
            step = step.sharded(train.shard_group, gathered)
        average = step.ema if train.keeps_average else 0
        moments = step.optimizer_state(train.optimizer)
        state = {"weights": step.weights, "optimizer": moments, "ema": average}
        samples, several = micro_batch(train)
        held = sum(state.values())
        drawn = 0
        trained_from = step.streamed
        if train.sample_every_n_steps:
            batch = min(evaluate.batch_size, len(sample_prompts(evaluate)))
            texts, drawing = map(self._get, self._drawing(train.compute_dtype))
            # Autocast keeps a copy of each trained weight until all pictures are drawn.
            casts = 0 if train.compute_dtype == "float32" else 2 * step.parameters
            vae = texts.weights - texts.pinned
            pictures = vae + sum(drawing.peak(batch).values())
            drawn = held + casts + max(texts.offloaded + texts.captions_peak(batch), pictures)
            if self._base.family.frozen_text is not None or not train.train_text_encoder:
                trained_from += texts.pinned  # trained ones stay on the device
        texts, drawing = map(self._get, self._drawing(evaluate.dtype))
        offload = evaluate.offload
        batch = evaluate.batch_size
        prompts = texts.held(offloads=offload) + texts.captions_peak(batch)
        sampling = drawing.held(offloads=offload) + sum(drawing.peak(batch).values())
        encoding, pinned = self._encoding_peak(encode)
        candidates = [step.peak(samples, accumulating=several)]
        if train.device.startswith("npu") and train.optimizer == "adamw":
            candidates.append(_foreach_step(step))
        drawn_from = max(texts.pinned, drawing.pinned) if offload else 0
        return Peaks(
            parts=state | max(candidates, key=lambda parts: sum(parts.values())),
            sampling=max(prompts, sampling),
            samples=drawn,
            encoding=encoding,
            checkpoint=held + step.largest,  # one array at a time is copied to the host
            host=max(trained_from, drawn_from, pinned),
        )

    def _encoding_peak(self, encode: Encode) -> tuple[int, int]:
        """Bytes on the GPU, and of the host's memory for offloaded text encoders."""
        step = self._get(self._encoding(encode.dtype, encode.text_precision))
        pictures = sum(step.peak(encode.batch_size).values())
        if encode.text == "token_ids":  # tokenizers alone
            return step.weights - step.pinned + pictures, 0
        batch = max(pictures, step.captions_peak(TEXT_BATCH))
        return step.held(offloads=encode.offload) + batch, encode.offload * step.pinned

    def largest_micro_batch(
        self,
        train: Train,
        evaluate: Evaluate,
        usable: int,
        most: int = 4096,
        *,
        enlarges: bool = False,
    ) -> int | None:
        """The largest micro-batch that fits, among those that the global batch size permits.

        Args:
            enlarges: whether the global batch size may grow to one micro-batch per GPU.
        """
        share = train.global_batch_size // train.world_size

        def exceeds(size: int) -> bool:
            batch = max(train.global_batch_size, size * train.world_size)
            sizes = {"micro_batch_size": size, "global_batch_size": batch}
            return self.peaks(with_settings(train, sizes), evaluate).largest > usable

        if enlarges and not exceeds(share):
            return bisect(range(share, LARGEST + 1), False, key=exceeds) + share - 1
        sizes = (size for size in range(min(share, most), 0, -1) if not exceeds(size))
        return next(sizes, None)


def with_settings(section: AnySection, settings: Mapping[str, Any]) -> AnySection:
    """The section with other settings; names of nested ones are dotted."""
    for dotted, value in settings.items():
        name, _, nested = dotted.partition(".")
        changed = with_settings(getattr(section, name), {nested: value}) if nested else value
        section = section.model_copy(update={name: changed})
    return section


def _foreach_step(step: StepMemory) -> dict[str, int]:
    """Bytes in AdamW's step by foreach kernels: the roots of all second moments, in float32.

    torch_npu has no fused kernel, which needs none.
    """
    size = 4 * step.parameters
    return {"gradients": size, "compute_weights": 0, "activations": 0, "temporaries": size}


def micro_batch(settings: Train) -> tuple[int, bool]:
    """Samples per micro-batch and GPU, and whether gradients exist before the last micro-batch.

    DistributedDataParallel keeps its buckets of gradients, too.
    """
    size = settings.micro_batch(settings.world_size)
    share = settings.global_batch_size // settings.world_size
    return size, size < share or settings.world_size > 1
