"""Describe, select and caption in a run: what a change of the recipe computes again, and a retraining."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published import folder, manifest, outcomes

from artifacts.latent_shards import open_latents
from artifacts.store import Store
from tasks.describe.tables import read_described
from tasks.select.selection import read_selection

pytestmark = pytest.mark.slow
Report = dict[str, Any]
Run = Callable[..., Report]


def shards(store: str, stage: str) -> dict[str, int]:
    """Name of each file of a stage's shards -> its time stamp."""
    files = Path(store, stage, "shards").iterdir()
    return {file.name: file.stat().st_mtime_ns for file in files}


def test_a_changed_threshold_describes_nothing_and_encodes_only_what_is_new(
    run_here: Run, small: dict[str, Any]
) -> None:
    store = str(small["store"])
    given = {**small, "describe": {"describers": {"quality": {"kind": "quality"}}}}

    def chosen(share: float) -> tuple[Report, int]:
        """A run with the sharpest pictures, and their number."""
        threshold = float(np.quantile(sharpness, 1 - share))
        where = {"select.where": f"quality_sharpness >= {threshold!r}"}
        report = run_here("digits", {**given, **where}, until="encode")
        return report, int((sharpness >= threshold).sum())

    described = run_here("digits", given, until="describe")
    artifact = Store(store).load("describe", described["stages"]["describe"]["key"])
    assert artifact is not None
    sharpness = read_described(artifact).read_all()["quality_sharpness"].to_numpy()
    tables = shards(store, "describe")

    half, count = chosen(0.5)
    encoded = shards(store, "encode")
    assert manifest(half, "encode")["summary"]["samples"] == count

    quarter, count = chosen(0.25)
    assert outcomes(quarter) == {
        **dict.fromkeys(("download", "describe"), "reused"),
        **dict.fromkeys(("select", "encode"), "built"),
    }
    assert shards(store, "describe") == tables and shards(store, "encode") == encoded
    assert manifest(quarter, "encode")["summary"]["samples"] == count

    most, more = chosen(0.75)
    after = shards(store, "encode")
    assert {name: after[name] for name in encoded} == encoded
    added = [ref for ref in open_latents(str(folder(most, "encode"))).shards]
    new = [ref for ref in added if ref.url.rpartition("/")[2] not in encoded]
    assert sum(sum(ref.groups.values()) for ref in new) == more - int(
        (sharpness >= float(np.quantile(sharpness, 0.5))).sum()
    )
    assert shards(store, "describe") == tables
    assert manifest(most, "encode")["summary"]["samples"] == more
