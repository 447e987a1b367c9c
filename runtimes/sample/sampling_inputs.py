"""Initial noise, conditioning and scheduler coefficients of sampling, as arrays on the host.

Image sizes and noise are equal on every runtime. `Conditioner` serves the runtimes that sample from
tabulated coefficients (tabulated_schedulers.py) in place of a diffusers pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.errors import Refused
from runtimes.contract import ImagesNotFinite
from runtimes.data.loader import TOKEN_STEP, pad_rows, padded_rows
from runtimes.families import Family, family_named
from runtimes.families.family import token_mask, worded
from runtimes.families.inpainting_aesthetics import ExtraInputs, aesthetic_scores, fully_masked
from runtimes.objective.noise_schedule import ResolutionShift, sampling_scheduler
from runtimes.objective.random_draws import Stream, generator
from runtimes.pipeline_folder.folder import Base
from runtimes.sample.tabulated_schedulers import SchedulerTable, tabulate

#: Scaled latents of references [N, C, h, w] f32, by their names in conditioning.
References = Mapping[str, NDArray[np.float32]]
NO_REFERENCES: References = {}


@dataclass(frozen=True)
class NoiseBatch:
    """Prompts and initial noise of one batch of images."""

    count: int  # images to return; the rows after them are padding
    prompts: list[str]  # [B], padded with copies of the last prompt
    height: int  # pixels
    width: int  # pixels
    noise: NDArray[np.float32]  # [B, C, h, w], standard normal
    #: One generator per image, for schedulers that draw noise at every step.
    rngs: list[np.random.Generator]
    references: References = field(default_factory=dict)  # of each image [B, C, h, w], padded


def size_step(base: Base) -> int:
    """The divisor of the sides of pictures that a model and its pipeline support, in pixels."""
    # Diffusers pipelines accept multiples of 8 only, even where the model accepts other sizes.
    return math.lcm(8, base.encoders["size_step"])


def check_size(asked: Mapping[str, int | None], base: Base) -> None:
    """Raise Refused for an image size that a model does not support.

    Args:
        asked: setting name to pixels; None stands for the model's default size.
    """
    step = size_step(base)
    for setting, pixels in asked.items():
        if (pixels or 0) % step:
            near = max(step, round((pixels or 0) / step) * step)
            raise Refused(f"{pixels} is not a multiple of {step}: set {near}", setting=setting)


def image_size(
    sampler: Mapping[str, Any], family: Family, config: Mapping[str, Any], scale: int
) -> tuple[int, int]:
    """(height, width) in pixels of a sampler's images; arguments as for `noise_batches`."""
    own = family.sample_size(config) * scale
    return sampler.get("height") or own, sampler.get("width") or own


def noise_batches(
    prompts: Sequence[str],
    sampler: Mapping[str, Any],
    family: Family,
    config: Mapping[str, Any],
    scale: int,
    *,
    first: int,
    rows: int = 0,
    references: References = NO_REFERENCES,
) -> Iterator[NoiseBatch]:
    """Yield batches of `batch_size` prompts with their initial noise.

    Image number n always has the same noise, so results do not depend on the batch size.

    Args:
        sampler: as GenerateJob.sampler; a height or width of None is the model's default.
        config: diffusers config of the denoiser.
        scale: image pixels per latent pixel, along one side (VAE scale factor).
        first: number of the first image; it selects the noise stream.
        rows: number of rows to which each batch is padded with copies of its last prompt.
        references: of all images.
    """
    height, width = image_size(sampler, family, config, scale)
    shape = (family.latent_channels(config), height // scale, width // scale)
    size = sampler["batch_size"]
    for start in range(0, len(prompts), size):
        part = list(prompts[start : start + size])
        count = len(part)
        part += [part[-1]] * (rows - count)
        numbers = range(first + start, first + start + len(part))
        rngs = [generator(sampler["seed"], Stream.PICTURE, number) for number in numbers]
        noise = np.stack([rng.standard_normal(shape, dtype=np.float32) for rng in rngs])
        own = {n: pad_rows(each[start : start + size], rows) for n, each in references.items()}
        yield NoiseBatch(count, part, height, width, noise, rngs, own)


def image_levels(images: NDArray[Any]) -> NDArray[np.uint8]:
    """Images [N, H, W, 3] in 0..1 as uint8.

    Raises:
        ImagesNotFinite: a pixel is NaN or infinite; as bytes, it would be black.
    """
    if not np.isfinite(images).all():
        raise ImagesNotFinite(
            "the model's pictures are not finite: a weight is not finite, or activations exceed "
            "the dtype of drawing (dtype, evaluate.dtype): choose bfloat16 or float32"
        )
    return np.asarray((images * 255).round().astype(np.uint8))


Float32 = NDArray[np.float32]
#: Encodes images [B, 3, H, W] f32 in -1..1 to the mean and log-variance [B, C, h, w] of latents.
Images = Callable[[Float32], tuple[Any, Any]]
#: Encodes B captions to prompt embeddings, B of [T, D], and pooled embeddings [B, P] or None.
Texts = Callable[[list[str]], tuple[Any, Float32 | None]]


@dataclass(frozen=True)
class ConditionedNoise:
    """Initial noise and conditioning of one batch, padded with copies of its last prompt."""

    count: int  # images to return; the rows after them are padding
    noise: Float32  # [B, C, h, w], standard normal
    #: Keyword to [B, ...] or, with guidance, [2 B, ...]. With guidance, rows 2i and 2i + 1 are the
    #: unconditional and conditional rows of image i: adjacent rows are on one device.
    conditioning: dict[str, Float32]


@dataclass(frozen=True)
class Conditioner:
    """Computes conditioning for a pipeline's denoiser, and the coefficients of its scheduler.

    Args:
        info: description of the pipeline's encoders, `Base.encoders`.
        texts: encodes captions.
        images: encodes images.
    """

    info: Mapping[str, Any]
    texts: Texts
    images: Images

    @property
    def family(self) -> Family:
        return family_named(self.info["family"])

    def table(
        self, scheduler: Any, sampler: Mapping[str, Any], denoiser: Mapping[str, Any]
    ) -> SchedulerTable:
        """Coefficients of the scheduler that `sampler` selects, or else of the model's scheduler.

        Args:
            scheduler: diffusers scheduler of the model.
            sampler: as GenerateJob.sampler.
            denoiser: diffusers config of the denoiser.

        Raises:
            Refused: the selected scheduler has no such table, or `eta` is not 0.
        """
        from runtimes.torch_models.loading import make_scheduler  # MindSpore's environment lacks it

        if sampler.get("eta"):
            raise Refused("eta: a tabulated scheduler draws no noise in its steps: set 0")
        family = self.family
        factor = self.info["vae_scale_factor"]
        steps = sampler["num_inference_steps"]
        chosen = sampling_scheduler(scheduler, sampler, make_scheduler)
        shift = ResolutionShift.from_config(chosen.config, family.latent_multiple(denoiser))
        height, width = image_size(sampler, family, denoiser, factor)
        mu = None
        if shift is not None:
            tokens = (height // factor // shift.patch) * (width // factor // shift.patch)
            mu = family.sampling_shift(shift, tokens, steps)
        return tabulate(chosen, steps, family.sigmas(steps), mu)

    def batches(
        self,
        prompts: Sequence[str],
        sampler: dict[str, Any],
        *,
        first: int,
        denoiser: Mapping[str, Any],
        multiple: int = 1,
        references: References = NO_REFERENCES,
    ) -> Iterator[ConditionedNoise]:
        """Yield batches of `batch_size` images, padded to a multiple of `multiple` rows.

        Args:
            sampler: as GenerateJob.sampler.
            first: number of the first image; it selects the noise stream.
            denoiser: diffusers config of the denoiser.
            multiple: number of devices that share the rows.
            references: of all images.
        """
        rows = padded_rows(sampler["batch_size"], multiple)
        family = self.family
        guided = family.is_guided(sampler, self.info)
        unconditional = self._unconditional(sampler.get("negative_prompt")) if guided else None
        factor = self.info["vae_scale_factor"]
        size = image_size(sampler, family, denoiser, factor)
        more = self._extra_inputs(ExtraInputs.from_config(denoiser), size, sampler, rows)
        drawn = family.drawing_condition(size, sampler["guidance_scale"])
        given: dict[str, Any] = {"first": first, "rows": rows, "references": references}
        for batch in noise_batches(prompts, sampler, family, denoiser, factor, **given):
            conditioning = self._embeds(batch.prompts)
            if guided and family.sees_references:
                unconditional = self._unconditional(sampler.get("negative_prompt"), batch.prompts)
            if unconditional is not None:
                conditioning, negative = same_length(conditioning, unconditional)
                conditioning = {
                    name: _interleave(np.broadcast_to(negative[name], array.shape), array)
                    for name, array in conditioning.items()
                }
            count = len(conditioning["prompt_embeds"])
            conditioning |= {n: np.repeat(array[None], count, axis=0) for n, array in drawn.items()}
            passes = count // len(batch.noise)
            conditioning |= {n: np.repeat(a, passes, axis=0) for n, a in batch.references.items()}
            yield ConditionedNoise(batch.count, batch.noise, conditioning | more)

    def _extra_inputs(
        self, extras: ExtraInputs, size: tuple[int, int], sampler: Mapping[str, Any], rows: int
    ) -> dict[str, Float32]:
        """Extra UNet inputs: a mask that hides the whole image, and the requested aesthetic score.

        Each is present only if the denoiser's config has that input.
        """
        inputs = {}
        if extras.inpainting:
            mean, _ = self.images(np.zeros((1, 3, *size), np.float32))
            times = 2 * rows if self.family.is_guided(sampler, self.info) else rows
            inputs["inpainting"] = np.repeat(fully_masked(mean, self.info), times, axis=0)
        if extras.aesthetic_score:
            scores = np.array(aesthetic_scores(sampler), np.float32)
            inputs["aesthetic_score"] = np.tile(scores, rows)
        return inputs

    def _unconditional(
        self, negative: str | None, beside: Sequence[str] = ("",)
    ) -> dict[str, Float32]:
        """Unconditional embeddings [B, ...] of guidance: the negative or the empty prompt.

        Args:
            beside: B prompts, whose references the text encoder sees.
        """
        embeds = self._embeds([worded(prompt, negative or "") for prompt in beside])
        if negative is None and self.info["empty_prompt"] == "zeros":
            return {name: np.zeros_like(array) for name, array in embeds.items()}
        return embeds

    def _embeds(self, captions: list[str]) -> dict[str, Float32]:
        states, pooled = self.texts(captions)
        if self.family.varying_lengths:
            return padded_embeds(states)
        # StableDiffusion3Pipeline pads with zeros where T5 is absent.
        missing = (self.info["tokens"] - states.shape[1], self.info["prompt_dim"] - states.shape[2])
        embeds = {"prompt_embeds": np.pad(states, ((0, 0), *((0, more) for more in missing)))}
        return embeds if pooled is None else {**embeds, "pooled_prompt_embeds": pooled}


def _interleave(unconditional: Float32, conditional: Float32) -> Float32:
    """Rows of two arrays [B, ...] by turns, [2 B, ...]: unconditional, conditional, ..."""
    return np.stack([unconditional, conditional], axis=1).reshape(-1, *unconditional.shape[1:])


def padded_embeds(states: Sequence[Float32]) -> dict[str, Float32]:
    """`prompt_embeds` [B, T, D] and their mask [B, T] f32, from B arrays of varying length.

    T has few values, so that few programs are compiled.
    """
    counts = [len(array) for array in states]
    length = TOKEN_STEP
    while length < max(counts):
        length *= 2
    return {
        "prompt_embeds": np.stack([_with_rows(array, length) for array in states]),
        "prompt_embeds_mask": token_mask(counts, length),
    }


def same_length(*conditionings: dict[str, Float32]) -> list[dict[str, Float32]]:
    """Pad embeddings and masks of varying length to the longest; others stay as they are."""
    if "prompt_embeds_mask" not in conditionings[0]:
        return list(conditionings)
    length = max(conditioning["prompt_embeds"].shape[1] for conditioning in conditionings)
    for name in ("prompt_embeds", "prompt_embeds_mask"):
        conditionings = tuple(
            c | {name: np.stack([_with_rows(row, length) for row in c[name]])}
            for c in conditionings
        )
    return list(conditionings)


def _with_rows(array: Float32, rows: int) -> Float32:
    """An array [T, ...] with zeros appended along its first axis, up to `rows`."""
    return np.pad(array, ((0, rows - len(array)), *[(0, 0)] * (array.ndim - 1)))
