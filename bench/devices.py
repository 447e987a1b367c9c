"""What benchmarks of stages on several devices share: pictures, stand-in devices, and the row."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from artifacts.image_shards import Sample, write_tar
from artifacts.records import digest_bytes
from bench.report import Rounds, Row, spread
from tasks.devices.processes import DevicePool, DeviceProcess, Plan

COUNTS = (1, 2, 4)


def samples(shard: int, pictures: int, side: int) -> list[Sample]:
    """Pictures of smooth noise as JPEG files; each has a caption of its own.

    Args:
        side: of the pictures, in pixels.
    """
    random = np.random.default_rng(shard)
    made = []
    for number in range(pictures):
        small = random.integers(0, 256, (16, 16, 3), np.uint8)
        picture = Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC)
        buffer = io.BytesIO()
        picture.save(buffer, "jpeg", quality=90)
        meta = {"sha256": digest_bytes(buffer.getvalue())}
        caption = f"picture {number} of shard {shard}"
        made.append(Sample(f"{number:06}", buffer.getvalue(), "jpg", (caption,), meta))
    return made


def write_tars(folder: Path, shards: int, pictures: int, side: int) -> list[tuple[str, str]]:
    """(path, sha256) of image shards with these pictures each."""
    folder.mkdir()
    tars = []
    for number in range(shards):
        path = folder / f"{number}.tar"
        write_tar(path, samples(number, pictures, side))
        tars.append((str(path), digest_bytes(path.read_bytes())))
    return tars


def stand_in_pool(plan: Plan, count: int) -> DevicePool:
    """A pool of `count` stand-in devices, each in a process of its own."""
    return DevicePool(plan, count, partial(DeviceProcess, module="bench.stand_in_encoder"))


def scaling_row(rounds: Rounds, name: str, rate: Callable[[int, Path], float], limit: float) -> Row:
    """`scaling_N`: rate on N devices, divided by N times the rate on one; 1 is linear.

    Args:
        rate: pictures per second on a number of devices, with a scratch folder.
        limit: pictures per second of a device that always works.
    """
    results = rounds.alternate(*(partial(rate, count) for count in COUNTS))
    rates = dict(zip(COUNTS, results, strict=True))
    figures: dict[str, Any] = {
        f"pictures_per_second_on_{count}": spread(rates[count]) for count in COUNTS
    }
    figures |= {
        f"device_busy_on_{count}": spread([rate / limit / count for rate in rates[count]])
        for count in COUNTS
    }
    ratios = {
        f"scaling_{count}": spread(
            [rate / count / single for rate, single in zip(rates[count], rates[1], strict=True)]
        )["median"]
        for count in COUNTS[1:]
    }
    return Row(name, ratios, figures)
