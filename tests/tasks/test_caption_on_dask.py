"""Captions on a Dask cluster that fetches the model from the store, and loses a worker."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from download_stage import build
from engines import dask_cluster
from kill_training import halt_at, kill_when_told
from picture_sources import make_pictures, write_folder
from shortest_recipe import shortest_recipe
from tiny_vision_language import save_vision_language

from artifacts.store import Store
from tasks.caption.stage import CaptionStage

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.xdist_group("engines")]

KILL_SECONDS = 300  # for a busy machine


def captioned(folder: Path, model: Path, beam: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Path and sha256 of the files of an artifact that is built in a folder's store."""
    write_folder(folder / "pictures", make_pictures(24))
    recipe = shortest_recipe(
        store=str(folder / "store"),
        source={"kind": "folder", "path": str(folder / "pictures")},
        download={"image_size": 32, "min_image_size": 16, "shard_size": 4},
        caption={
            "model": str(model),
            "prompts": {"short": "In short:", "long": "At length:"},
            "checks": {"cut_off": False, "max_repetition": 1},
            "max_new_tokens": 6,
            "batch_size": 3,
            "dtype": "float32",
            "device": "cpu",
            "beam": dict(beam),
        },
        shared_folders=[str(folder)],
    )
    stage = CaptionStage(recipe, build(recipe))
    draft = Store(recipe.store).draft(stage.parts)
    artifact = draft.commit(stage.build(draft, lambda *_: None), {})
    return [(entry.path, entry.sha256) for entry in artifact.files]


def test_a_killed_worker_loses_and_changes_no_caption(tmp_path: Path) -> None:
    model = save_vision_language(tmp_path / "model")
    for name in ("embedded", "cluster"):
        (tmp_path / name).mkdir()
    undisturbed = captioned(tmp_path / "embedded", model, {})
    assert len(undisturbed) > 6  # enough shards for several workers
    told = tmp_path / "told"
    halting = halt_at(r"/caption/shards/.*\.json$", 2, told)
    with dask_cluster(tmp_path / "dask", 3, halting) as address:
        killing = kill_when_told(told, KILL_SECONDS)
        beam = {"runner": "DaskRunner", "dask_client_address": address}
        assert captioned(tmp_path / "cluster", model, beam) == undisturbed
    killing.join(0)
    assert not killing.is_alive(), "no worker was killed"
