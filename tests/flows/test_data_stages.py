"""Describe, select and caption in a run: what a change computes again, and a retraining."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caption_server import CaptionServer
from published import folder, manifest, outcomes

from artifacts.latent_shards import open_latents
from artifacts.store import Store
from configs.settings.recipe import STAGES
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

    first = run_here("digits", given, until="describe")
    artifact = Store(store).load("describe", first["stages"]["describe"]["key"])
    assert artifact is not None
    sharpness = read_described(artifact).read_all()["quality_sharpness"].to_numpy()
    tables = shards(store, "describe")

    half, least = chosen(0.5)
    encoded = shards(store, "encode")
    assert manifest(half, "encode")["summary"]["samples"] == least

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
    refs = open_latents(str(folder(most, "encode"))).shards
    new = [ref for ref in refs if ref.url.rpartition("/")[2] not in encoded]
    assert sum(sum(ref.groups.values()) for ref in new) == more - least
    assert shards(store, "describe") == tables
    assert manifest(most, "encode")["summary"]["samples"] == more


@pytest.mark.extended
def test_a_retraining_describes_and_captions_what_is_new_and_selects_over_all(
    run_here: Run, here: Callable[..., str], api: str, small: dict[str, Any]
) -> None:
    prompts = {"short": "In a word?", "long": "In a sentence?"}
    with CaptionServer() as server:
        given = {
            **small,
            "train.sample_every_n_steps": 0,
            "retrain.max_steps": 2,
            "describe": {},
            "select": {"limit": 40, "duplicates": {"perceptual": "hash"}},
            "caption": {
                "endpoint": {"urls": [server.base_url], "model": "colours"},
                "prompts": prompts,
                "prefix": "chalk: ",
                "max_bad": 1.0,
            },
        }
        first = run_here("digits", given)
        assert outcomes(first) == dict.fromkeys(STAGES, "built")
        assert first["status"] == "published"
        assert len(server.asked) == 40 * len(prompts)
        assert manifest(first, "encode")["summary"]["samples"] == 40

        wider = {**given, "source.count": 90, "select.limit": 60}
        said = here("retrain", "digits", "--json", overrides=wider, api=api)
        grown = json.loads(said.splitlines()[-1])
        assert grown["status"] == "published"
        kept = {stage: kept_pictures(report) for stage, report in (("old", first), ("new", grown))}
        added = kept["new"] - kept["old"]
        assert len(kept["new"]) == 60 and len(server.asked) == (40 + len(added)) * len(prompts)
    for stage in ("download", "describe"):
        assert names(first, stage) < names(grown, stage)
    inputs = manifest(grown, "evaluate")["inputs"]
    assert inputs["images"] == manifest(first, "download")["digest"]
    assert inputs["latents"] == manifest(first, "encode")["digest"]
    facts = (manifest(one, "evaluate")["summary"]["fingerprint"] for one in (first, grown))
    assert len(set(facts)) == 1


def kept_pictures(report: Report) -> set[bytes]:
    """Sha256 of the pictures that a run selected."""
    url = str(folder(report, "select").parents[1])
    artifact = Store(url).load("select", report["stages"]["select"]["key"])
    assert artifact is not None
    table = read_selection(artifact)
    return set(table.filter(table["kept"])["id"].to_pylist())


def names(report: Report, stage: str) -> set[str]:
    """The shards of a stage's artifact."""
    paths = (entry["path"] for entry in manifest(report, stage)["files"])
    return {path for path in paths if path.startswith("../")}
