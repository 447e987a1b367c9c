"""Describe, select and caption in a run: what a change computes again, and a retraining."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caption_server import CaptionServer
from picture_sources import make_pictures, write_folder
from PIL import Image
from published import folder, manifest, outcomes

from artifacts.latent_shards import open_latents
from artifacts.store import Store
from configs.settings.recipe import STAGES
from tasks.describe.tables import read_described
from tasks.encode.crop_to_bucket import is_holdout
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
def test_of_one_changed_picture_alone_each_stage_does_its_work_again(
    run_here: Run, small: dict[str, Any], tmp_path: Path
) -> None:
    write_folder(tmp_path / "pictures", make_pictures(24))
    given = {name: value for name, value in small.items() if not name.startswith("source.")}
    store = str(small["store"])
    with CaptionServer() as server:
        endpoint = {"urls": [server.base_url], "model": "colours"}
        given |= {
            "source": {"kind": "folder", "path": str(tmp_path / "pictures")},
            "download.shard_size": 4,
            "describe": {},
            "select": {"duplicates": {"perceptual": "hash"}},
            "caption": {"endpoint": endpoint, "prompts": {"short": "In a word?"}, "max_bad": 1.0},
            "encode.holdout": 0.0,
        }
        first = run_here("digits", given, until="encode")
        assert len(server.asked) == 24
        encoded = shards(store, "encode")
        changed = sorted((tmp_path / "pictures").rglob("*.png"))[7]
        Image.new("RGB", (40, 40), "red").save(changed)
        second = run_here("digits", given, until="encode")
        assert len(server.asked) == 25
    assert manifest(second, "describe")["summary"]["described"] == {"hash": 1, "quality": 1}
    latents = names(second, "encode") - names(first, "encode")
    assert latents and {name.rpartition("/")[2] for name in latents} & set(encoded) == set()
    assert len({name.rpartition("/")[2].partition(".")[0] for name in latents}) == 1


@pytest.mark.soak
def test_a_retraining_describes_and_captions_what_is_new_and_selects_over_all(
    run_here: Run, here: Callable[..., str], api: str, small: dict[str, Any]
) -> None:
    prompts = {"short": "In a word?", "long": "In a sentence?"}
    with CaptionServer() as server:
        given = {
            **small,
            "train.sample_every_n_steps": 0,
            "retrain.max_steps": 2,
            "encode.holdout": 0.15,
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
        assert manifest(first, "encode")["summary"]["samples"] == 40
        # Held-out pictures keep the captions of the source.
        assert len(server.asked) == trained_on(first) * len(prompts)

        wider = {**given, "source.count": 90, "select.limit": 60}
        said = here("retrain", "digits", "--json", overrides=wider, api=api)
        grown = json.loads(said.splitlines()[-1])
        assert grown["status"] == "published"
        kept = {stage: kept_pictures(report) for stage, report in (("old", first), ("new", grown))}
        new = {id for id in kept["new"] - kept["old"] if not is_holdout(id, 0.15)}
        assert len(kept["new"]) == 60
        assert len(server.asked) == (trained_on(first) + len(new)) * len(prompts)
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


def trained_on(report: Report) -> int:
    summary = manifest(report, "encode")["summary"]
    return int(summary["samples"] - summary["holdout"])


def names(report: Report, stage: str) -> set[str]:
    """The shards of a stage's artifact."""
    paths = (entry["path"] for entry in manifest(report, stage)["files"])
    return {path for path in paths if path.startswith("../")}


@pytest.mark.soak
def test_what_masks_hide_is_not_in_the_loss(
    run_here: Run, small: dict[str, Any], tmp_path: Path
) -> None:
    """The losses of both halves of the pictures, each hidden once, sum to that of the whole."""
    write_folder(tmp_path / "pictures", make_pictures(12))
    given = {name: value for name, value in small.items() if not name.startswith("source.")}
    given |= {"train.steps": 1, "train.sample_every_n_steps": 0, "encode.holdout": 0.0}
    given |= {"encode.aspect_buckets": False, "download.shard_size": 100}

    def loss(source: dict[str, str], **train: Any) -> float:
        folder_source = {"kind": "folder", "path": str(tmp_path / "pictures"), **source}
        report = run_here("digits", {**given, "source": folder_source, **train}, until="train")
        line, *_ = (folder(report, "train") / "history.jsonl").read_text().splitlines()
        return float(json.loads(line)["loss"])

    def half(left: int, right: int) -> float:
        masks = tmp_path / f"masks-{left}"
        for file in (tmp_path / "pictures").rglob("*.png"):
            with Image.open(file) as picture:
                mask = Image.new("L", picture.size, right)
                mask.paste(left, (0, 0, picture.width // 2, picture.height))
            path = masks / file.relative_to(tmp_path / "pictures")
            path.parent.mkdir(parents=True, exist_ok=True)
            mask.save(path)
        return loss({"mask": "files", "mask_folder": str(masks)}, **{"train.masked_loss": {}})

    whole = loss({})
    left, right = half(255, 0), half(0, 255)
    assert min(left, right) > 0.2 * whole
    assert left + right == pytest.approx(whole, rel=2e-3)  # 8 bits
