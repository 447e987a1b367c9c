"""Stages whose work two hosts do, by a stand-in for ssh: the bytes are those of this machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import ssh_hosts
from encode_stage import digests_of, encode_images, encode_recipe, images_of, pictures_of
from slurm_cluster import slurm_cluster
from waiting import wait_until

from artifacts.store import Artifact, Store
from configs.errors import Refused
from configs.settings.clusters import Slurm, Ssh
from configs.settings.recipe import Recipe
from runtimes.process.collectives import free_port
from tasks.devices import commit_shards
from tasks.hosts import choose
from tasks.preflight import devices_here

if TYPE_CHECKING:
    from evaluation_world import World

pytestmark = pytest.mark.slow
Encode = Callable[..., dict[str, str]]


def forbidden(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("the flow's process opens a model")


def on_hosts(recipe: Recipe, stage: str, *names: str) -> Recipe:
    """The recipe with a stage on the named hosts."""
    ssh = Ssh(hosts=names, address="127.0.0.1", port=free_port(), silence_seconds=10, restarts=1)
    section = getattr(recipe, stage).model_copy(update={"hosts": len(names)})
    return recipe.model_copy(update={stage: section, "ssh": ssh})


@pytest.fixture
def encode(tiny_sdxl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Encode:
    """`encode(store, *hosts)` encodes three image shards; the digests of the latent shards."""
    ssh_hosts.stand_in(tmp_path, monkeypatch)

    def run(name: str, *hosts: str) -> dict[str, str]:
        recipe = encode_recipe(tmp_path / name, tiny_sdxl)
        images = images_of(Store(recipe.store), pictures_of(), tmp_path)
        seen: list[tuple[int, int]] = []
        with pytest.MonkeyPatch.context() as patch:
            if hosts:
                recipe = on_hosts(recipe, "encode", *hosts)
                patch.setattr(commit_shards, "DevicePool", forbidden)
            artifact: Artifact = encode_images(recipe, images, seen=seen)
        assert (21, 21) in seen
        return digests_of(artifact)

    return run


def test_two_hosts_encode_the_bytes_of_this_machine(encode: Encode) -> None:
    """The connection to one of them is cut, which ends neither the other nor the stage."""
    assert encode("hosts", "one", "cut") == encode("here")


def test_two_hosts_draw_the_pictures_of_this_machine(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh_hosts.stand_in(tmp_path, monkeypatch)
    trained = world.trained(0.5)
    batches = world.recipe.evaluate.model_copy(update={"batch_size": 2})
    recipe = world.recipe.model_copy(update={"evaluate": batches})
    here = world.evaluate(trained, recipe)
    shutil.rmtree(Path(world.store.root) / "evaluate")
    there = world.evaluate(trained, on_hosts(recipe, "evaluate", "one", "two"), run=forbidden)
    assert there.digest == here.digest


def test_hosts_without_a_cluster_are_refused(
    tiny_sdxl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    recipe = encode_recipe(tmp_path, tiny_sdxl, hosts=2)
    with pytest.raises(Refused, match=r"encode\.hosts: 2 hosts are asked for, but neither"):
        choose.check(recipe)


def test_a_store_that_hosts_cannot_read_is_refused(tiny_sdxl: Path) -> None:
    recipe = on_hosts(encode_recipe("memory://store", tiny_sdxl), "encode", "one", "two")
    with pytest.raises(Refused, match="store: other machines cannot read memory"):
        choose.check(recipe, ["encode"])


def test_workers_of_beam_and_hosts_exclude_each_other(tiny_sdxl: Path, tmp_path: Path) -> None:
    beam = {"runner": "DaskRunner", "dask_client_address": "10.0.0.1:8786"}
    recipe = encode_recipe(tmp_path, tiny_sdxl, beam=beam)
    with pytest.raises(Refused, match=r"encode\.hosts: workers of beam\.runner encode already"):
        choose.check(on_hosts(recipe, "encode", "one", "two"), ["encode"])


def test_no_device_is_asked_for_what_hosts_compute(tiny_sdxl: Path, tmp_path: Path) -> None:
    recipe = encode_recipe(tmp_path, tiny_sdxl, device="cuda:7")
    stages = ["encode", "train"]
    assert devices_here(recipe, stages) == {"encode.device": "cuda:7", "train.device": "auto"}
    assert devices_here(on_hosts(recipe, "encode", "one", "two"), stages) == {}


@pytest.mark.extended
@pytest.mark.xdist_group("slurm")
def test_a_host_of_slurm_that_loses_power_leaves_its_shards_to_the_other(
    tiny_sdxl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node dies after the first shard; Slurm may end the job, and the next attempt goes on."""
    shards = pictures_of(12)
    here = encode_recipe(tmp_path / "here", tiny_sdxl)
    images = images_of(Store(here.store), shards, tmp_path)
    expected = digests_of(encode_images(here, images))
    recipe = encode_recipe(tmp_path / "hosts", tiny_sdxl, hosts=2)
    recipe = recipe.model_copy(update={"slurm": Slurm(silence_seconds=10)})
    images = images_of(Store(recipe.store), shards, tmp_path)
    with slurm_cluster(slurmd_timeout=10) as cluster, ThreadPoolExecutor(1) as thread:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(commit_shards, "DevicePool", forbidden)
        encoding = thread.submit(encode_images, recipe, images)
        made = tmp_path / "hosts/encode/shards"
        wait_until(lambda: encoding.done() or list(made.glob("*.json")), 240)
        cluster.kill("n2")
        cluster.start("n2")
        assert digests_of(encoding.result(240)) == expected
        assert cluster.jobs() == []
