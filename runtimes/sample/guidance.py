"""Classifier-free guidance: whether a step applies it, and its arguments of FluxPipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtimes.families.family import Family


def is_guided(family: Family, sampler: Mapping[str, Any], info: Mapping[str, Any]) -> bool:
    """Whether a step applies classifier-free guidance.

    Args:
        info: description of the pipeline's encoders, from describe_encoders.
    """
    return family.guidance_weight(sampler) > 1 and not info.get("distilled", False)


def true_cfg_arguments(
    family: Family, sampler: Mapping[str, Any], prompts: Sequence[str]
) -> dict[str, Any]:
    """Keyword arguments of FluxPipeline for classifier-free guidance; none for other families."""
    scale = family.guidance_weight(sampler)
    if not family.guidance_input or scale <= 1:
        return {}
    negative = sampler.get("negative_prompt") or ""
    return {"true_cfg_scale": scale, "negative_prompt": [negative] * len(prompts)}
