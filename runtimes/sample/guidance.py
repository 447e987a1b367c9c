"""Classifier-free guidance (arXiv 2207.12598)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtimes.families.family import Family


def cfg_scale(family: Family, sampler: Mapping[str, Any]) -> float:
    """Scale of classifier-free guidance (arXiv 2207.12598); 1 or less is none.

    The `guidance_scale` of a family with a guidance input is that input. Such a family has
    `true_cfg_scale`, as diffusers' FluxPipeline has.
    """
    if family.guidance_input:
        return float(sampler.get("true_cfg_scale", 1.0))
    return float(sampler["guidance_scale"])


def is_guided(family: Family, sampler: Mapping[str, Any]) -> bool:
    """Whether a step applies classifier-free guidance (arXiv 2207.12598)."""
    return cfg_scale(family, sampler) > 1


def true_cfg_arguments(
    family: Family, sampler: Mapping[str, Any], prompts: Sequence[str]
) -> dict[str, Any]:
    """Keyword arguments of FluxPipeline for classifier-free guidance; none for other families."""
    if not (family.guidance_input and is_guided(family, sampler)):
        return {}
    negative = sampler.get("negative_prompt") or ""
    scale = cfg_scale(family, sampler)
    return {"true_cfg_scale": scale, "negative_prompt": [negative] * len(prompts)}


def guide(unconditional: Any, conditional: Any, guidance_scale: Any) -> Any:
    """Classifier-free guidance (arXiv 2207.12598), as the diffusers pipelines compute it.

    Args:
        unconditional: the denoiser's output [B, C, h, w] without caption; an array of any library.
        conditional: the denoiser's output [B, C, h, w] with caption.
        guidance_scale: scalar; 1 is no guidance.
    """
    return unconditional + guidance_scale * (conditional - unconditional)
