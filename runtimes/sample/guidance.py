"""Classifier-free guidance (arXiv 2207.12598)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtimes.families.family import Family


def is_guided(family: Family, sampler: Mapping[str, Any]) -> bool:
    """Whether a step applies classifier-free guidance (arXiv 2207.12598).

    A model with a guidance input is distilled: it needs no unconditional prediction.
    """
    return bool(sampler["guidance_scale"] > 1) and not family.guidance_input


def guide(unconditional: Any, conditional: Any, guidance_scale: Any) -> Any:
    """Classifier-free guidance (arXiv 2207.12598), as the diffusers pipelines compute it.

    Args:
        unconditional: the denoiser's output [B, C, h, w] without caption; an array of any library.
        conditional: the denoiser's output [B, C, h, w] with caption.
        guidance_scale: scalar; 1 is no guidance.
    """
    return unconditional + guidance_scale * (conditional - unconditional)
