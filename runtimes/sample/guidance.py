"""Classifier-free guidance (arXiv 2207.12598)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtimes.families.family import Family


def is_guided(family: Family, sampler: Mapping[str, Any], info: Mapping[str, Any]) -> bool:
    """Whether a step applies classifier-free guidance (arXiv 2207.12598).

    Args:
        info: description of the pipeline's encoders, from describe_encoders.
    """
    weight = family.guidance_weight(sampler["guidance_scale"])
    return bool(weight > 1) and not info.get("distilled", False)
