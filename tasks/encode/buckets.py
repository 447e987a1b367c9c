"""Aspect buckets: the sizes of pictures that one batch may hold, and the nearest one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from runtimes.contract import WrongInput

if TYPE_CHECKING:
    from tasks.encode.decode_and_crop import TransformSettings

Size = tuple[int, int]  # (height, width), pixels


def bucket_sizes(settings: TransformSettings, factor: int) -> list[Size]:
    """The target sizes of pictures, sorted.

    The area of a bucket is at most that of the square, as in SDXL (appendix I of its paper).

    Args:
        factor: the model needs sides that are multiples of this many pixels.

    Raises:
        WrongInput: the resolution does not fit the factor or the bucket step.
    """
    side = settings.resolution
    if not settings.aspect_buckets:
        if side % factor:
            raise WrongInput(f"encode.resolution: {side} is no multiple of the model's {factor}")
        return [(side, side)]
    step = math.lcm(settings.bucket_step, factor)
    if side < step:
        raise WrongInput(
            f"encode.bucket_step: its step of {step} pixels (a multiple of the model's {factor}) "
            f"exceeds encode.resolution ({side})"
        )
    pairs = {(a, side**2 // a // step * step) for a in range(step, side + 1, step)}
    pairs = {(a, b) for a, b in pairs if max(a, b) <= settings.max_aspect * min(a, b)}
    square = side // step * step
    return sorted(pairs | {(b, a) for a, b in pairs} | {(square, square)})


def nearest_bucket(size: Size, buckets: list[Size]) -> Size:
    """The bucket with the nearest log aspect ratio."""
    aspect = math.log(size[1] / size[0])
    return min(buckets, key=lambda b: (abs(math.log(b[1] / b[0]) - aspect), b))
