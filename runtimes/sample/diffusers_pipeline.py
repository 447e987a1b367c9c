"""Sampling by a diffusers pipeline, put together from a folder and trained parts.

mindone's pipelines have the same interface. `BasePipeline` is the part of a generate job's pipeline
that does not depend on the framework.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, lru_cache
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artifacts.latent_shards import LatentScale
from runtimes.families import Family
from runtimes.families.family import REFERENCE, SeenPrompt, reference_latents
from runtimes.families.inpainting_aesthetics import NO_EXTRA_INPUTS, ExtraInputs, aesthetic_scores
from runtimes.objective.noise_schedule import read_scheduler_config, sampling_scheduler
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import Drawing, GenerateJob
from runtimes.sample.generate_job import LOSS_BATCH
from runtimes.sample.reference_pictures import ReferenceLimits, read_picture
from runtimes.sample.sampling_inputs import (
    NO_REFERENCES,
    NoiseBatch,
    References,
    image_levels,
    noise_batches,
)

#: References whose latents stay in the host's memory; of 1024 x 1024 pixels, one has about 1 MB.
KEPT_REFERENCES = 64


class PipelineSampler(ABC):
    """A pipeline with replaceable components.

    Initial noise is drawn on the host, and is the same on every device.

    Args:
        pipe: the pipeline, on its device.
        family: family of the pipeline.
        make_scheduler: constructs a scheduler from its diffusers config.
        pads_batches: whether batches are padded to `batch_size` images, to reuse one program.
    """

    def __init__(
        self,
        pipe: Any,
        family: Family,
        make_scheduler: Callable[[dict[str, Any]], Any],
        *,
        pads_batches: bool = False,
    ) -> None:
        self._pipe = pipe
        self._family = family
        self._make_scheduler = make_scheduler
        self._pads_batches = pads_batches
        pipe.set_progress_bar_config(disable=True)
        self._defaults = {n: getattr(pipe, n) for n in ("scheduler", *family.clip_encoders)}
        self._control: Any = None  # the ControlNet of the model of `use`

    def use(self, network: Any, scheduler: Any = None) -> None:
        """Replace components of the pipeline; all others are reset to the pipeline's.

        Args:
            network: its `parts` replace components; None keeps all.
            scheduler: scheduler of the model; None is the pipeline's.
        """
        parts = {} if network is None else network.parts
        self._control = getattr(network, "control", None)
        own = {} if scheduler is None else {"scheduler": scheduler}
        self._pipe.register_modules(**{**self._defaults, **parts, **own})

    def release_network(self) -> None:
        """Drop the references to the model of `use`, to free its memory for the next model."""
        self._pipe.register_modules(**self._defaults, **{self._family.denoiser: None})
        self._control = None

    def draw(
        self,
        prompts: Sequence[str],
        sampler: dict[str, Any],
        *,
        first: int,
        references: References = NO_REFERENCES,
        controls: Sequence[str] = (),
    ) -> NDArray[np.uint8]:
        """Sample one image per prompt, in batches of `batch_size`.

        Args:
            prompts: N prompts.
            sampler: as GenerateJob.sampler.
            first: number of the first image; it selects the noise stream.
            references: scaled latents of references [N, C, h, w] f32, by their conditioning name.
            controls: URLs of N control pictures, for a model with a ControlNet; (): none.

        Returns:
            Images [N, H, W, 3] uint8.

        Raises:
            ImagesNotFinite: an image has pixels without a value.
        """
        given: dict[str, Any] = {"first": first, "references": references, "controls": controls}
        drawn = self.draw_floats(prompts, sampler, **given)
        return np.concatenate([image_levels(images) for images in drawn])

    def draw_floats(
        self,
        prompts: Sequence[str],
        sampler: dict[str, Any],
        *,
        first: int,
        references: References = NO_REFERENCES,
        controls: Sequence[str] = (),
    ) -> Iterator[NDArray[np.float32]]:
        """Yield the images of each batch [B, H, W, 3] f32 in 0..1; arguments as for `draw`."""
        pipe = self._pipe
        family = self._family
        scheduler = sampling_scheduler(pipe.scheduler, sampler, self._make_scheduler)
        pipe.register_modules(scheduler=scheduler)
        denoiser = getattr(pipe, family.denoiser)
        rows = sampler["batch_size"] if self._pads_batches else 0
        given: dict[str, Any] = {"first": first, "rows": rows, "references": references}
        scale = pipe.vae_scale_factor
        done = 0
        for batch in noise_batches(prompts, sampler, family, denoiser.config, scale, **given):
            size = (batch.height, batch.width)
            latents = [self._to_device(array) for array in reference_latents(batch.references)]
            own = list(controls[done : done + batch.count]) if self._control is not None else []
            done += batch.count
            own += own[-1:] * (len(batch.prompts) - len(own))  # padding
            with (
                self._extra_inputs(denoiser, sampler, size),
                family.reading(denoiser, latents) if latents else nullcontext(),
                self._controlled(denoiser, own, sampler, size) if own else nullcontext(),
            ):
                drawn = self._call(
                    batch,
                    height=batch.height,
                    width=batch.width,
                    num_inference_steps=sampler["num_inference_steps"],
                    guidance_scale=sampler["guidance_scale"],
                    output_type="np",
                    **optional_arguments(family, sampler, len(batch.prompts)),
                )
            yield np.asarray(drawn[: batch.count], np.float32)

    @contextmanager
    def _extra_inputs(
        self, denoiser: Any, sampler: dict[str, Any], size: tuple[int, int]
    ) -> Iterator[None]:
        """Within the context, a text-to-image pipeline passes the denoiser's extra inputs.

        The extra inputs (inpainting_aesthetics.py) are an inpainting mask that hides the whole
        image, and the requested aesthetic score. A forward pre-hook of the denoiser adds them.

        Args:
            sampler: as GenerateJob.sampler.
            size: (height, width) of the images, in pixels.
        """
        extras = ExtraInputs.from_config(denoiser.config)
        if extras == NO_EXTRA_INPUTS:
            yield
            return
        mask = self._fully_masked(size) if extras.inpainting else None
        scores = np.array(aesthetic_scores(sampler) if extras.aesthetic_score else [], np.float32)

        def add(_: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
            latents = inputs[0]
            if mask is not None:
                rows = np.repeat(mask, len(latents), axis=0)
                inputs = (self._append_channels(latents, rows), *inputs[1:])
            if len(scores):  # with guidance, the unconditional rows come first
                rows = np.repeat(scores, len(latents) // len(scores))
                named = {**named, "class_labels": self._to_device(rows)}
            return inputs, named

        handle = denoiser.register_forward_pre_hook(add, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _controlled(
        self, denoiser: Any, urls: Sequence[str], sampler: dict[str, Any], size: tuple[int, int]
    ) -> AbstractContextManager[None]:
        """Within the context, the denoiser takes the outputs of the ControlNet.

        Args:
            urls: those of the batch's control pictures.
            sampler: as GenerateJob.sampler.
            size: (height, width) of the images, in pixels.
        """
        raise NotImplementedError("only runtime torch draws with a ControlNet; others are refused")

    @abstractmethod
    def encode_picture(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        """The VAE's mean [B, C, h, w] f32 of pixels [B, 3, H, W] in -1..1, unscaled."""

    @abstractmethod
    def _call(self, batch: NoiseBatch, **options: Any) -> Any:
        """Call the pipeline on a batch; images [B, H, W, 3] f32 in 0..1."""

    @abstractmethod
    def _fully_masked(self, size: tuple[int, int]) -> NDArray[np.float32]:
        """Mask and masked-image latents [1, 1 + C, h, w] of one fully masked image."""

    @abstractmethod
    def _to_device(self, array: NDArray[np.float32]) -> Any:
        """Copy an array to the device."""

    @abstractmethod
    def _append_channels(self, latents: Any, more: NDArray[np.float32]) -> Any:
        """Concatenate latents [B, C, h, w] and an array [B, M, h, w], in the latents' dtype."""


def seen_prompts(
    family: Family, prompts: Sequence[str], references: Sequence[Sequence[str]]
) -> list[str]:
    """The prompts, with the references beside them if the family's text encoder sees them.

    Args:
        references: files of each prompt's references; () if none has any.
    """
    if not (family.sees_references and references):
        return list(prompts)

    @cache
    def seen(path: str) -> Any:
        return family.condition_picture(read_picture(path))

    return [
        SeenPrompt(prompt, paths, [seen(path) for path in paths])
        for prompt, paths in zip(prompts, references, strict=True)
    ]


#: Encodes B prompts to states [B, T, D] and pooled embeddings [B, P] or None, on the device.
Texts = Callable[[list[str]], tuple[Any, Any]]


def encode_prompt_by(pipe: Any, texts: Texts) -> Callable[..., tuple[Any, ...]]:
    """An `encode_prompt` for SD's or SDXL's pipeline whose captions another function encodes.

    Args:
        texts: encodes prompts as training does: in chunks, or with weights.
    """
    own = signature(pipe.encode_prompt)

    def encode_prompt(*args: Any, **named: Any) -> tuple[Any, ...]:
        asked = own.bind(*args, **named).arguments
        prompts = asked["prompt"]
        states, pooled = texts(prompts)
        negative = negative_pooled = None
        if asked["do_classifier_free_guidance"]:
            given = asked.get("negative_prompt")
            negative, negative_pooled = texts(given or [""] * len(prompts))
            if given is None and pipe.config.get("force_zeros_for_empty_prompt"):
                negative, negative_pooled = negative * 0, negative_pooled * 0
        if pooled is None:
            return states, negative
        return states, negative, pooled, negative_pooled

    return encode_prompt


def optional_arguments(family: Family, sampler: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Optional keyword arguments of a diffusers pipeline that the sampler settings contain.

    Args:
        sampler: as GenerateJob.sampler.
        count: images in the batch; each gets the negative prompt.

    Returns:
        Where set: `negative_prompt` (list of `count` strings), `eta` (DDIM, arXiv 2010.02502) and
        `true_cfg_scale` (FluxPipeline's classifier-free guidance, which needs a negative prompt).
    """
    arguments: dict[str, Any] = {}
    if sampler.get("negative_prompt") is not None:
        arguments["negative_prompt"] = [sampler["negative_prompt"]] * count
    if sampler.get("eta"):
        arguments["eta"] = sampler["eta"]
    if family.guidance_input and (scale := family.guidance_weight(sampler)) > 1:
        arguments = {"true_cfg_scale": scale, "negative_prompt": [""] * count} | arguments
    return arguments


class BasePipeline(ABC):
    """Methods of contract.Pipeline that all runtimes share.

    One sampler serves all models, since its encoders and VAE are those of the base pipeline.

    Args:
        job: images to generate, and their models.
        base: the job's pipeline.
        make_scheduler: constructs a scheduler from its diffusers config.
        save_compiled: saves newly compiled programs to the cache.
    """

    def __init__(
        self,
        job: GenerateJob,
        base: Base,
        make_scheduler: Callable[[dict[str, Any]], Any],
        save_compiled: Callable[[], None] = lambda: None,
    ) -> None:
        self._job = job
        self._base = base
        self._make_scheduler = make_scheduler
        self._save_compiled = save_compiled
        self._sampler: Any = None  # constructed for the first image
        self._network: Any = None
        self._scale = LatentScale.from_info(base.encoders)
        self._limits = ReferenceLimits(job.reference_pixels, job.reference_step)
        self._reference = lru_cache(KEPT_REFERENCES)(self._encode_reference)
        self._loss_rows = min(LOSS_BATCH, job.sampler.get("batch_size", LOSS_BATCH))

    def load(self, drawing: Drawing) -> None:
        self._release()
        self._network = self._load_network(drawing)
        self._scheduler = None  # the pipeline's
        if "scheduler" in drawing.parts:  # training changed noise schedule or prediction type
            config = read_scheduler_config(Path(drawing.parts["scheduler"]))
            self._scheduler = self._make_scheduler(config)
        self.encodes_text = self._network.encodes_text

    def draw(
        self,
        prompts: Sequence[str],
        first: int,
        references: Sequence[Sequence[str]] = (),
        controls: Sequence[str] = (),
    ) -> NDArray[np.uint8]:
        if self._sampler is None:
            self._sampler = self._open_sampler()
        self._use_network()
        latents = {
            f"{REFERENCE}{number}": np.stack([self._reference(path) for path in paths])
            for number, paths in enumerate(zip(*references, strict=True))
        }
        prompts = seen_prompts(self._base.family, prompts, references)
        options: dict[str, Any] = {"first": first, "references": latents}
        options |= {"controls": controls} if controls else {}  # runtime torch alone has them
        drawn: NDArray[np.uint8] = self._sampler.draw(prompts, self._job.sampler, **options)
        self._save_compiled()
        return drawn

    def _encode_reference(self, path: str) -> NDArray[np.float32]:
        """Scaled latents [C, h, w] f32 of a reference's file."""
        mean: NDArray[np.float32] = self._sampler.encode_picture(self._limits.read(path)[None])
        return self._scale.scaled(mean)[0]

    def compile_seconds(self) -> float:
        return 0.0

    def _release(self) -> None:
        """Drop references to the previous model: the device need not hold two of them."""
        self._network = None
        if self._sampler is not None:
            self._sampler.release_network()

    def _use_network(self) -> None:
        """Set the sampler's network and scheduler."""
        self._sampler.use(self._network, self._scheduler)

    @abstractmethod
    def _load_network(self, drawing: Drawing) -> Any:
        """The frozen network of a drawing, on the device."""

    @abstractmethod
    def _open_sampler(self) -> Any:
        """A sampler with the encoders and the VAE of the base pipeline."""
