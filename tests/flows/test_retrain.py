"""`kiln retrain`: only new rows are fetched, the gate decides, and no decision is made twice."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kill_training import kill_training
from published import expect, folder, history, manifest, outcomes
from safetensors.numpy import load_file

from artifacts.gc import CONTINUED
from artifacts.latent_shards import open_latents
from runtimes.adapters.lora_files import LORA_WEIGHTS
from tasks.publish.registry import Registry

pytestmark = pytest.mark.slow
Report = dict[str, Any]
Retrain = Callable[..., Report]


@pytest.fixture
def quick(small: dict[str, Any]) -> dict[str, Any]:
    """Overrides for a retraining in seconds."""
    return {**small, "train.sample_every_n_steps": 0, "retrain.max_steps": 2}


@pytest.fixture
def retrain(
    here: Callable[..., str], api: str, quick: dict[str, Any], first: Report
) -> Callable[..., Report]:
    """`retrain(overrides)` is the report of `kiln retrain digits`; v1 is the champion."""

    def run(overrides: dict[str, Any]) -> Report:
        said = here("retrain", "digits", "--json", overrides={**quick, **overrides}, api=api)
        report: Report = json.loads(said.splitlines()[-1])
        return report

    return run


def names(found: dict[str, Any]) -> set[str]:
    return {entry["path"] for entry in found["files"] if entry["path"].startswith("../")}


def test_a_grown_source_continues_the_champion_on_its_new_rows(
    retrain: Retrain, first: Report, small: dict[str, Any], here: Callable[..., str]
) -> None:
    same = retrain({})
    assert (same["status"], same["start"], same["stages"]) == ("unchanged", "v1", {})
    assert same["why"] == "the source has no new rows since v1"

    grown = retrain({"source.count": 90})
    # Copies of the pictures that the champion was measured on are left out, too.
    held_out = manifest(grown, "encode")["inputs"]["compared"]
    assert held_out == manifest(first, "download")["digest"]
    found = grown["changes"]
    assert (found["new_rows"], found["removed_rows"], found["rows_to_fetch"]) == (30, 0, 30)
    for stage in ("download", "encode"):  # all old shards are used as they are
        assert names(manifest(first, stage)) < names(manifest(grown, stage))
    assert found["kept_shards"] == manifest(first, "download")["summary"]["shards"]
    samples = grown["samples"]
    assert (samples["new"], samples["steps"]) == (25, 2)
    assert samples["replayed"] == 25  # half of all, from whole shards and a part of one
    train = manifest(grown, "train")
    assert train["inputs"]["start"] == manifest(first, "train")["digest"]
    assert train["run"]["parents"][CONTINUED]["key"] == manifest(first, "train")["key"]
    assert train["inputs"]["base"] == manifest(first, "train")["inputs"]["base"]
    # The reference of all metrics stays, so the champion's are comparable without a measurement.
    assert manifest(grown, "evaluate")["inputs"]["images"] == manifest(first, "download")["digest"]
    assert manifest(grown, "evaluate")["inputs"]["latents"] == manifest(first, "encode")["digest"]
    facts = (manifest(one, "evaluate")["summary"]["fingerprint"] for one in (first, grown))
    assert len(set(facts)) == 1
    assert (grown["status"], grown["champion"]["version"]) == ("published", "v2")
    assert retrain({"source.count": 90})["why"] == "the source has no new rows since v2"

    store = str(small["store"])
    assert "v1 is the champion again" in here("rollback", "digits", "--store", store)
    back = retrain({"source.count": 90})
    assert back["status"] == "unchanged" and back["start"] == "v1"
    assert back["why"] == "v2 of these rows was published before, and v1 is champion again"
    assert "damaged" not in here("verify", "--store", store)


@pytest.mark.soak
def test_few_new_rows_are_validated_on_the_held_out_rows_of_the_whole_source(
    retrain: Retrain, first: Report
) -> None:
    """Neither of two new rows is held out, and the best checkpoint is chosen all the same."""
    rule = {"train.holdout_loss.every_n_steps": 1, "train.best_checkpoint": {}}
    grown = retrain({"source.count": 62, "retrain.replay": 0.0, **rule})
    assert (grown["samples"]["new"], grown["samples"]["replayed"]) == (2, 0)
    job = manifest(grown, "train")
    chosen = job["run"]["parents"]["latents"]["key"]
    selected = folder(grown, "train").parents[1] / "encode" / chosen
    assert open_latents(str(selected)).held_out == 0
    assert open_latents(str(folder(first, "encode"))).held_out > 0
    losses = [line.get("validation_loss") for line in history(folder(grown, "train"))]
    assert len(losses) == 2 and None not in losses
    assert job["inputs"]["holdout"] == manifest(grown, "encode")["digest"]
    assert job["summary"]["chosen_because"].startswith("the lowest holdout_loss of 1 checkpoints")
    assert grown["status"] == "published"


@pytest.mark.soak
def test_a_lora_retraining_continues_the_champion_s_adapters(
    run_here: Callable[..., Report], here: Callable[..., str], api: str, small: dict[str, Any]
) -> None:
    lora = {**small, "publish.name": "lora", "train.sample_every_n_steps": 0}
    before = run_here("digits-lora", lora)
    champion = load_file(folder(before, "train") / LORA_WEIGHTS)
    assert any(array.any() for name, array in champion.items() if "lora_B" in name)
    # Too small a rate to move a weight: what is published is what the training started from.
    for rate, moved in ((1e-30, False), (1e-2, True)):
        more = {"source.count": 90, "retrain.max_steps": 2, "retrain.learning_rate": rate}
        said = here("retrain", "digits-lora", "--json", overrides={**lora, **more}, api=api)
        after: Report = json.loads(said.splitlines()[-1])
        assert (after["status"], after["start"]) == ("published", "v1")
        assert manifest(after, "train")["inputs"]["start"] == manifest(before, "train")["digest"]
        adapters = load_file(folder(after, "train") / LORA_WEIGHTS)
        assert adapters.keys() == champion.keys()
        equal = [np.array_equal(adapters[name], array) for name, array in champion.items()]
        assert not any(equal) if moved else all(equal)
        here("rollback", "lora", "--store", str(small["store"]))


@pytest.mark.extended
def test_a_rejected_model_leaves_the_champion_and_is_not_trained_again(
    retrain: Retrain, quick: dict[str, Any], here: Callable[..., str], api: str
) -> None:
    strict = {"source.count": 90, "publish.gate": ["holdout_loss < champion * 0.1"]}
    said = here("retrain", "digits", overrides={**quick, **strict}, code=3, api=api)
    assert "rejected by the gate: holdout_loss < champion * 0.1" in said
    registry = Registry(f"{quick['store']}/registry", "digits")
    champion = registry.champion()
    assert champion is not None and champion.name == "v1"
    again = retrain(strict)
    assert again["status"] == "unchanged"
    assert again["why"] == "the gate rejected a model of these 90 rows and v1 before"
    easier = retrain({**strict, "publish.gate": []})
    assert easier["status"] == "published"
    assert outcomes(easier) == expect("publish")


@pytest.mark.soak
def test_after_a_rollback_further_rows_continue_from_the_restored_champion(
    retrain: Retrain, first: Report, small: dict[str, Any], here: Callable[..., str]
) -> None:
    assert retrain({"source.count": 90})["champion"]["version"] == "v2"
    here("rollback", "digits", "--store", str(small["store"]))
    more = retrain({"source.count": 100})
    assert (more["start"], more["changes"]["new_rows"]) == ("v1", 40)
    assert manifest(more, "train")["inputs"]["start"] == manifest(first, "train")["digest"]
    assert (more["status"], more["champion"]["version"]) == ("published", "v3")


@pytest.mark.soak
def test_a_killed_retraining_resumes_with_the_weights_of_an_undisturbed_one(
    retrain: Retrain, quick: dict[str, Any], tmp_path: Path, here: Callable[..., str], api: str
) -> None:
    longer = {"source.count": 90, "retrain.max_steps": 6, "train.checkpointing_steps": 2}
    copy = str(tmp_path / "copy")
    shutil.copytree(quick["store"], copy, symlinks=True)
    whole = retrain(longer)
    killed = {**quick, **longer, "store": copy}
    run = partial(here, "retrain", "digits", overrides=killed, code=1, api=api)
    kill_training(run, tmp_path, checkpoint=2)
    resumed = retrain({**longer, "store": copy})
    assert manifest(resumed, "train")["run"]["resumed_from"] == 2
    assert manifest(whole, "train")["run"]["resumed_from"] == 0
    assert manifest(resumed, "train")["digest"] == manifest(whole, "train")["digest"]
    assert (resumed["status"], resumed["champion"]["version"]) == ("published", "v2")
