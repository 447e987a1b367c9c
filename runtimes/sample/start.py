"""What the pictures of a GenerateJob are drawn with and start from, a batch at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtimes.adapters.lora import read_adapters
from runtimes.contract import WrongInput
from runtimes.families import Family, detect_family
from runtimes.objective.noise_scheduler import read_config
from runtimes.objective.random import Stream, generator
from runtimes.pipeline_folder.describe import describe_encoders
from runtimes.process.job import Drawing

#: A part's name, its folder and the adapters to be merged into it -> the part.
Load = Callable[[str, Path, Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Start:
    """One batch of pictures."""

    count: int  # pictures that are wanted
    prompts: list[str]  # perhaps filled up with copies of the last
    height: int  # pixels
    width: int
    noise: NDArray[np.float32]  # [N, C, h, w]
    #: Each picture's own, for schedulers that draw noise at every step.
    rngs: list[np.random.Generator]


def own_parts(drawing: Drawing, model: Path, load: Load) -> dict[str, Any]:
    """A model's own parts: its denoiser, and its text encoders if they were trained too.

    Raises:
        WrongInput: its adapters are of another model.
    """
    family = detect_family(model)
    adapters = {} if drawing.lora is None else read_adapters(Path(drawing.lora))
    known = (family.denoiser, *family.clip_encoders)
    if strange := adapters.keys() - set(known):
        raise WrongInput(f"{drawing.lora} is for another model: it has adapters of {min(strange)}")
    return {
        name: load(name, Path(drawing.parts.get(name, model / name)), adapters.get(name, {}))
        for name in known
        if name == family.denoiser or name in adapters.keys() | drawing.parts.keys()
    }


def own_scheduler(drawing: Drawing, make: Callable[[dict[str, Any]], Any]) -> Any:
    """The scheduler of a model trained over to other noise than the pipeline's, or None.

    Args:
        make: makes one from its config.
    """
    if "scheduler" not in drawing.parts:
        return None
    return make(read_config(Path(drawing.parts["scheduler"])))


def more_of(sampler: Mapping[str, Any], count: int) -> dict[str, Any]:
    """What a pipeline of diffusers is asked besides, where it is: a prompt to lead away from, for
    each of `count` pictures, and DDIM's eta."""
    found: dict[str, Any] = {}
    if sampler.get("negative_prompt") is not None:
        found["negative_prompt"] = [sampler["negative_prompt"]] * count
    if sampler.get("eta"):
        found["eta"] = sampler["eta"]
    return found


def check_size(asked: Mapping[str, int | None], model: Path, vae: Path | None = None) -> None:
    """Raise WrongInput for pixels that a model cannot draw.

    Args:
        asked: setting -> pixels; None is the model's own.
        model: folder of its pipeline.
        vae: of one in place of the pipeline's own.
    """
    # Diffusers' pipelines take multiples of 8 only, whatever the model would.
    step = math.lcm(8, describe_encoders(model, vae)["size_step"])
    for setting, pixels in asked.items():
        if (pixels or 0) % step:
            raise WrongInput(f"{setting}: {pixels} is not a multiple of {step}")


def starts(
    prompts: Sequence[str],
    sampler: Mapping[str, Any],
    family: Family,
    config: Mapping[str, Any],
    scale: int,
    *,
    first: int,
    rows: int = 0,
) -> Iterator[Start]:
    """Batches of `batch_size`; the first picture's noise is number `first`, whatever the batches.

    Args:
        sampler: as GenerateJob.sampler; a height or width of None is the model's own.
        config: the denoiser's.
        scale: pixels a side of a latent.
        rows: that each batch is filled up to, with copies of its last prompt.
    """
    own = family.sample_size(config) * scale
    height, width = (sampler.get(side) or own for side in ("height", "width"))
    shape = (family.latent_channels(config), height // scale, width // scale)
    size = sampler["batch_size"]
    for start in range(0, len(prompts), size):
        part = list(prompts[start : start + size])
        count = len(part)
        part += [part[-1]] * (rows - count)
        numbers = range(first + start, first + start + len(part))
        rngs = [generator(sampler["seed"], Stream.PICTURE, number) for number in numbers]
        noise = np.stack([rng.standard_normal(shape, dtype=np.float32) for rng in rngs])
        yield Start(count, part, height, width, noise, rngs)
