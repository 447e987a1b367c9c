"""The held-out split of pictures."""

from __future__ import annotations


def is_holdout(sha256: bytes, fraction: float) -> bool:
    """Whether a picture is held out: a deterministic choice by its digest."""
    return int.from_bytes(sha256[:8], "big") / 2**64 < fraction
