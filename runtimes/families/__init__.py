"""Model families: which conditioning a family's denoiser takes, and how it is passed.

A family is one entry of `FAMILIES`, and all that training knows of it. Encoding and drawing know
more: its text encoders (pipeline_folder/describe.py), how its pipeline is built (generate.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artifacts.latents import LatentSample, stack_rows
from runtimes.contract import WrongInput


@dataclass(frozen=True)
class Captioned:
    """A sample with what the caption that was chosen for it is conditioned on.

    With `input_ids`, the CLIP encoders are run in the step, and the embeddings are left out but
    for a family with T5, whose rows are below CLIP's.
    """

    sample: LatentSample
    prompt_embeds: NDArray[Any] | None  # [T, D], f32 or bf16 bits (u16)
    pooled_prompt_embeds: NDArray[Any] | None  # [P], as well
    input_ids: NDArray[np.int32] | None = None  # [n, T], a row for each CLIP encoder
    dropped: bool = False  # with input_ids: the embeddings are to be zeros


Conditioning = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Family:
    """What tells one architecture's conditioning from another's."""

    name: str
    #: diffusers classes, as model_index.json names them: that of text to image, of inpainting
    pipelines: tuple[str, ...]
    denoiser: str  # the pipeline's part that predicts, and its folder
    clip_encoders: tuple[str, ...]  # parts whose token ids are kept, and which may be trained
    condition: Callable[[Sequence[Captioned]], Conditioning]  # samples -> keyword -> [B, ...]
    arguments: Callable[[Mapping[str, Any]], dict[str, Any]]  # the same -> the denoiser's keywords
    has_t5: bool = False  # rows below CLIP's in prompt_embeds are T5's, which is never trained


def _text_condition(samples: Sequence[Captioned]) -> Conditioning:
    """Prompt embeddings [B, T, D] or, where captions are encoded in the step, token ids [B, n, T].

    With token ids goes `dropped` [B] f32: 1 where the embeddings are to be zeros.
    """
    if samples[0].input_ids is None:
        return {"prompt_embeds": _stack("prompt_embeds", samples)}
    return {
        "input_ids": _stack("input_ids", samples),
        "dropped": np.array([s.dropped for s in samples], np.float32),
    }


def _pooled_condition(samples: Sequence[Captioned]) -> Conditioning:
    """Adds pooled embeddings [B, P], unless they too are made in the step."""
    found = _text_condition(samples)
    if "prompt_embeds" in found:
        found["pooled_prompt_embeds"] = _stack("pooled_prompt_embeds", samples)
    return found


def _sdxl_condition(samples: Sequence[Captioned]) -> Conditioning:
    """Adds sizes [B, 6] (SDXL, arXiv 2307.01952, section 2.2)."""
    sizes = np.array([add_time_ids(s.sample) for s in samples], np.float32)
    return _pooled_condition(samples) | {"add_time_ids": sizes}


def _sd3_condition(samples: Sequence[Captioned]) -> Conditioning:
    """With token ids, adds the rows of T5 [B, T5, D] (SD3, arXiv 2403.03206, section 4.2)."""
    found = _pooled_condition(samples)
    if "input_ids" in found:
        tokens = found["input_ids"].shape[-1]
        found["t5_prompt_embeds"] = _stack("prompt_embeds", samples)[:, tokens:]
    return found


def _stack(name: str, samples: Sequence[Captioned]) -> NDArray[Any]:
    rows = [getattr(sample, name) for sample in samples]
    if any(row is None for row in rows):
        raise WrongInput(f"the latents have no {name}, which this model needs: encode again")
    return stack_rows(rows)


def add_time_ids(sample: LatentSample) -> tuple[int, ...]:
    """(original height, width, crop top, left, target height, width), pixels; kept in float32."""
    return (*sample.original_size, *sample.crop_top_left, *sample.target_size)


def _sd_arguments(conditioning: Mapping[str, Any]) -> dict[str, Any]:
    found = {"encoder_hidden_states": conditioning["prompt_embeds"]}
    if "aesthetic_score" in conditioning:  # see unet_inputs.py
        found["class_labels"] = conditioning["aesthetic_score"]
    return found


def _sdxl_arguments(conditioning: Mapping[str, Any]) -> dict[str, Any]:
    return _sd_arguments(conditioning) | {
        "added_cond_kwargs": {
            "text_embeds": conditioning["pooled_prompt_embeds"],
            "time_ids": conditioning["add_time_ids"],
        }
    }


def _sd3_arguments(conditioning: Mapping[str, Any]) -> dict[str, Any]:
    return _sd_arguments(conditioning) | {
        "pooled_projections": conditioning["pooled_prompt_embeds"]
    }


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "sd",
            ("StableDiffusionPipeline", "StableDiffusionInpaintPipeline"),
            "unet",
            ("text_encoder",),
            _text_condition,
            _sd_arguments,
        ),
        Family(
            "sdxl",
            ("StableDiffusionXLPipeline", "StableDiffusionXLInpaintPipeline"),
            "unet",
            ("text_encoder", "text_encoder_2"),
            _sdxl_condition,
            _sdxl_arguments,
        ),
        Family(
            "sd3",
            ("StableDiffusion3Pipeline",),
            "transformer",
            ("text_encoder", "text_encoder_2"),
            _sd3_condition,
            _sd3_arguments,
            has_t5=True,
        ),
    )
}


#: What the base's VAE and text encoders ask of any denoiser between them, and the size that
#: pictures have where none is asked for.
_BETWEEN = (
    "_class_name",
    "in_channels",
    "out_channels",
    "cross_attention_dim",
    "joint_attention_dim",
    "pooled_projection_dim",
    "addition_embed_type",
    "class_embed_type",
    "encoder_hid_dim_type",
    "num_class_embeds",
    "addition_time_embed_dim",
    "projection_class_embeddings_input_dim",
    "sample_size",
)


#: The blocks that these models repeat, by class: what is gathered, or computed again, at a time.
BLOCKS = ("BasicTransformerBlock", "CLIPEncoderLayer", "JointTransformerBlock", "ResnetBlock2D")


def check_fits(config: Mapping[str, Any], base: Mapping[str, Any]) -> None:
    """Raise WrongInput if a denoiser could not take the place of the base's, by their configs."""
    for name in _BETWEEN:
        given, wanted = config.get(name), base.get(name)
        if given != wanted:
            said = "is missing" if name not in config else f"is {given}"
            raise WrongInput(f"train.denoiser_config: {name} {said}, the base's is {wanted}")


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
