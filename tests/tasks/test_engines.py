"""The Beam stages on a Dask cluster, and on Beam's job service with an external worker pool."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from download_stage import build
from engine_stages import content, described, encoded, make_recipe
from engines import LateHeartbeats, dask_cluster, job_service
from kill_training import halt_at, kill_when_told

from configs.errors import Away

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("engines")]

KILL_SECONDS = 300  # for a busy machine


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, tiny_sdxl: Path
) -> tuple[list[Any], list[Any]]:
    """Files of both artifacts by the embedded runner."""
    recipe = make_recipe(tmp_path_factory.mktemp("embedded"), "store", tiny_sdxl, {})
    images = build(recipe)
    found = content(images), content(encoded(recipe, images))
    assert len(found[1]) > 4  # enough shards for several workers
    return found


@pytest.mark.extended
def test_dask_workers_write_the_bytes_of_the_embedded_runner(
    tmp_path: Path,
    tiny_sdxl: Path,
    undisturbed: tuple[list[Any], list[Any]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    with dask_cluster(tmp_path / "cluster", 2) as address:
        beam = {"runner": "DaskRunner", "dask_client_address": address}
        recipe = make_recipe(tmp_path, "store", tiny_sdxl, beam)
        images = build(recipe)
        latents = encoded(recipe, images)
    assert (content(images), content(latents)) == undisturbed
    assert capfd.readouterr() == ("", "")


@pytest.mark.extended
def test_external_workers_write_the_bytes_of_the_embedded_runner(
    tmp_path: Path,
    tiny_sdxl: Path,
    undisturbed: tuple[list[Any], list[Any]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    cache = tmp_path / "cache"
    with job_service(tmp_path / "service", 2, {"KILN_CACHE": str(cache)}) as beam:
        recipe = make_recipe(tmp_path, "store", tiny_sdxl, beam)
        images = build(recipe)
        latents = encoded(recipe, images)
    assert (content(images), content(latents)) == undisturbed
    assert capfd.readouterr() == ("", "")
    (kept,) = (cache / "kilnworks/models").glob("*/pipeline")  # one copy for both workers
    assert not list(kept.glob("unet/*.safetensors"))


@pytest.mark.extended
def test_a_dask_cluster_of_the_run_prints_nothing(
    tmp_path: Path,
    tiny_sdxl: Path,
    undisturbed: tuple[list[Any], list[Any]],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = LateHeartbeats(monkeypatch)  # the last ones are cut off
    recipe = make_recipe(tmp_path, "store", tiny_sdxl, {"runner": "DaskRunner"})
    assert content(build(recipe)) == undisturbed[0]
    assert late.asked.is_set()
    assert capfd.readouterr() == ("", "")


def halting(told: Path, stage: str) -> dict[str, str]:
    """Environment in which the first worker to commit a second shard of a stage halts."""
    return halt_at(rf"/{stage}/shards/.*\.json$", 2, told)


@pytest.mark.soak
@pytest.mark.parametrize("stage", ["download", "encode"])
def test_a_killed_dask_worker_loses_and_doubles_nothing(
    tmp_path: Path, tiny_sdxl: Path, undisturbed: tuple[list[Any], list[Any]], stage: str
) -> None:
    told = tmp_path / "told"
    with dask_cluster(tmp_path / "cluster", 3, halting(told, stage)) as address:
        beam = {"runner": "DaskRunner", "dask_client_address": address}
        recipe = make_recipe(tmp_path, "store", tiny_sdxl, beam)
        killing = kill_when_told(told, KILL_SECONDS)
        images = build(recipe)
        latents = encoded(recipe, images)
    killing.join(0)
    assert not killing.is_alive(), "no worker was killed"
    assert (content(images), content(latents)) == undisturbed


@pytest.mark.soak
def test_a_dask_worker_that_is_killed_while_it_describes_changes_nothing(
    tmp_path: Path, tiny_sdxl: Path, tiny_model: Callable[[str], Path]
) -> None:
    """It halts between two tables of an image shard; the workers fetch the models."""
    clip = {"kind": "clip", "model": str(tiny_model("tiny-clip"))}
    describers = {"clip": clip, "hash": {"kind": "hash"}}
    section = {"describers": describers, "batch_size": 4, "device": "cpu"}
    told = tmp_path / "told"
    recipe = make_recipe(tmp_path, "store", tiny_sdxl, {}, describe=section)
    images = build(recipe)
    variables = {**halting(told, "describe"), "KILN_CACHE": str(tmp_path / "cache")}
    with dask_cluster(tmp_path / "cluster", 3, variables) as address:
        beam = {"runner": "DaskRunner", "dask_client_address": address}
        on_dask = make_recipe(tmp_path, "store", tiny_sdxl, {}, describe={**section, "beam": beam})
        killing = kill_when_told(told, KILL_SECONDS)
        found = described(on_dask, images)
    killing.join(0)
    assert not killing.is_alive(), "no worker was killed"
    recipe = make_recipe(tmp_path, "another", tiny_sdxl, {}, describe=section)
    assert content(found) == content(described(recipe, images))
    assert list((tmp_path / "cache/kilnworks/models").iterdir())


@pytest.mark.soak
@pytest.mark.parametrize("stage", ["download", "encode"])
def test_a_killed_external_worker_fails_the_job_and_a_retry_completes_it(
    tmp_path: Path,
    tiny_sdxl: Path,
    undisturbed: tuple[list[Any], list[Any]],
    stage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = tmp_path / "told"
    with job_service(tmp_path / "service", 2, halting(told, stage)) as beam:
        recipe = make_recipe(tmp_path, "store", tiny_sdxl, beam)
        kill_when_told(told, KILL_SECONDS)
        images = build(recipe) if stage == "encode" else None
        with pytest.raises(Away, match="workers were lost"):
            build(recipe) if images is None else encoded(recipe, images)
        assert not [one for one in caplog.records if one.name == "root"]
        kept = len(list(Path(recipe.store, stage, "shards").glob("*.json")))
        assert kept > 0
        images = build(recipe)
        latents = encoded(recipe, images)
    assert (content(images), content(latents)) == undisturbed
