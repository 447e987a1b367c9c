"""The held-out split of pictures."""

from __future__ import annotations


def is_holdout(sha256: bytes, fraction: float) -> bool:
    """Whether a picture is held out: a deterministic choice by the sha256 of its download.

    The choice depends neither on URL and caption nor on the stored size and format. No picture
    moves to the other split, and copies of a file are in one split.
    """
    return int.from_bytes(sha256[:8], "big") / 2**64 < fraction
