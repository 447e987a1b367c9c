"""The losses and gradient norms of known runs: a change that should alter no numbers alters none.

A change that should is followed by `KILN_GOLDEN=write`, which writes those of the tests that run.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from conformance.runs import largest_difference
from tolerances import GOLDEN

PATH = Path(__file__).with_name("golden.json")
FIGURES = ("loss", "grad_norm")
#: Variants that are held to the figures of another, on another kind of device.
SAME_AS = {"cuda": "torch"}
Figures = Mapping[str, float | None]  # of a step; no norm where it overflowed


def check(variant: str, run: str, dtype: str, steps: Sequence[Figures]) -> None:
    """Compare the figures of a run's first 20 steps with those of golden.json.

    Args:
        run: its family and method, such as `sdxl full`.
        dtype: what it computes in: a key of tolerances.GOLDEN.
    """
    key = f"{SAME_AS.get(variant, variant)} {run} {dtype}"
    found = {name: [step[name] for step in steps[:20]] for name in FIGURES}
    if os.environ.get("KILN_GOLDEN") == "write" and variant not in SAME_AS:
        _write(key, found)
    expected = json.loads(PATH.read_text(encoding="utf-8"))[key]
    for name in FIGURES:
        same = found[name] == pytest.approx(expected[name], rel=GOLDEN[dtype])
        assert same, f"{key}, {name}: {largest_difference(found[name], expected[name])}"


def _write(key: str, found: Mapping[str, object]) -> None:
    with PATH.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        kept = {**json.loads(file.read() or "{}"), key: found}
        lines = (f"{json.dumps(name)}: {json.dumps(kept[name])}" for name in sorted(kept))
        file.truncate(0)
        file.write("{\n" + ",\n".join(lines) + "\n}\n")
