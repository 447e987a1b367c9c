"""Model families: which conditioning a family's denoiser takes, and how it is passed.

A family is one entry of `FAMILIES`, and all that training knows of it. Encoding and drawing know
more: which text encoders it has (encoders.py), how its pipeline is built (a runtime's generate).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artifacts.latents import LatentSample
from runtimes.base import WrongInput


@dataclass(frozen=True)
class Captioned:
    """A sample with the embeddings of the caption that was chosen for it."""

    sample: LatentSample
    prompt_embeds: NDArray[np.float32]  # [T, D]
    pooled_prompt_embeds: NDArray[np.float32] | None  # [P]


Conditioning = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Family:
    """What tells one architecture's conditioning from another's."""

    name: str
    pipelines: tuple[str, ...]  # diffusers classes, as model_index.json names them
    denoiser: str  # the pipeline's part that predicts, and its folder
    condition: Callable[[Sequence[Captioned]], Conditioning]  # samples -> keyword -> [B, ...]
    arguments: Callable[[Mapping[str, Any]], dict[str, Any]]  # the same -> the UNet's keywords


def _prompt_embeds(samples: Sequence[Captioned]) -> Conditioning:
    return {"prompt_embeds": np.stack([s.prompt_embeds for s in samples])}  # [B, T, D]


def _sdxl_condition(samples: Sequence[Captioned]) -> Conditioning:
    """Adds pooled embeddings [B, P] and sizes [B, 6] (SDXL, arXiv 2307.01952, section 2.2)."""
    pooled = [s.pooled_prompt_embeds for s in samples]
    if any(row is None for row in pooled):
        raise WrongInput("the latents have no pooled embeddings, which SDXL needs: encode again")
    return _prompt_embeds(samples) | {
        "pooled_prompt_embeds": np.stack([row for row in pooled if row is not None]),
        "add_time_ids": np.array([add_time_ids(s.sample) for s in samples], np.float32),
    }


def add_time_ids(sample: LatentSample) -> tuple[int, ...]:
    """(original height, width, crop top, left, target height, width), pixels; kept in float32."""
    return (*sample.original_size, *sample.crop_top_left, *sample.target_size)


def _sd_arguments(conditioning: Mapping[str, Any]) -> dict[str, Any]:
    return {"encoder_hidden_states": conditioning["prompt_embeds"]}


def _sdxl_arguments(conditioning: Mapping[str, Any]) -> dict[str, Any]:
    return _sd_arguments(conditioning) | {
        "added_cond_kwargs": {
            "text_embeds": conditioning["pooled_prompt_embeds"],
            "time_ids": conditioning["add_time_ids"],
        }
    }


FAMILIES = {
    family.name: family
    for family in (
        Family("sd", ("StableDiffusionPipeline",), "unet", _prompt_embeds, _sd_arguments),
        Family("sdxl", ("StableDiffusionXLPipeline",), "unet", _sdxl_condition, _sdxl_arguments),
    )
}


def detect_family(folder: Path) -> Family:
    """The family of the pipeline in `folder`. Raises WrongInput if there is none known here."""
    index = folder / "model_index.json"
    try:
        pipeline = json.loads(index.read_text(encoding="utf-8"))["_class_name"]
    except FileNotFoundError:
        raise WrongInput(f"{index} is missing: a diffusers pipeline folder is needed") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WrongInput(f"{index} cannot be read: {error}") from None
    for family in FAMILIES.values():
        if pipeline in family.pipelines:
            return family
    known = ", ".join(name for family in FAMILIES.values() for name in family.pipelines)
    raise WrongInput(f"{index}: {pipeline} is not of a family known here (known: {known})")
