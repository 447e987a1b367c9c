"""Initial noise and sizes of the pictures of a GenerateJob, and pictures as bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.errors import Refused
from runtimes.contract import ImagesNotFinite
from runtimes.families import Family
from runtimes.objective.random_draws import Stream, generator
from runtimes.pipeline_folder.folder import Base


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


def check_size(asked: Mapping[str, int | None], base: Base) -> None:
    """Raise Refused for an image size that a model does not support.

    Args:
        asked: setting name to pixels; None stands for the model's default size.
    """
    # Diffusers pipelines accept multiples of 8 only, even where the model accepts other sizes.
    step = math.lcm(8, base.encoders["size_step"])
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
) -> Iterator[NoiseBatch]:
    """Yield batches of `batch_size` prompts with their initial noise.

    Image number n always has the same noise, so results do not depend on the batch size.

    Args:
        sampler: as GenerateJob.sampler; a height or width of None is the model's default.
        config: diffusers config of the denoiser.
        scale: image pixels per latent pixel, along one side (VAE scale factor).
        first: number of the first image; it selects the noise stream.
        rows: number of rows to which each batch is padded with copies of its last prompt.
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
        yield NoiseBatch(count, part, height, width, noise, rngs)


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
