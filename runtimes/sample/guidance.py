"""Classifier-free guidance: its weight, and the arguments of a pipeline that has two scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtimes.families.family import Family


def cfg_weight(family: Family, sampler: Mapping[str, Any]) -> float:
    """Weight of classifier-free guidance (arXiv 2207.12598); 1 or less is none.

    The `guidance_scale` of a family with a guidance input is that input. Such a family has
    `true_cfg_scale`, as diffusers' FluxPipeline has.
    """
    if family.guidance_input:
        return float(sampler.get("true_cfg_scale", 1.0))
    return float(family.guidance_weight(sampler["guidance_scale"]))


def is_guided(family: Family, sampler: Mapping[str, Any], info: Mapping[str, Any]) -> bool:
    """Whether a step applies classifier-free guidance.

    Args:
        info: description of the pipeline's encoders, from describe_encoders.
    """
    return cfg_weight(family, sampler) > 1 and not info.get("distilled", False)


def true_cfg_arguments(
    family: Family, sampler: Mapping[str, Any], prompts: Sequence[str]
) -> dict[str, Any]:
    """Keyword arguments of FluxPipeline for classifier-free guidance; none for other families."""
    scale = cfg_weight(family, sampler)
    if not family.guidance_input or scale <= 1:
        return {}
    negative = sampler.get("negative_prompt") or ""
    return {"true_cfg_scale": scale, "negative_prompt": [negative] * len(prompts)}
