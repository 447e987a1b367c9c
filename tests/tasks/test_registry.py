"""Versions are numbered, complete or absent; the champion moves forth and back."""

import json
from pathlib import Path

import pytest
from stores import REMOTE, UrlOf

from artifacts.store import Artifact, KeyParts, Store, StoreError
from tasks.publish.model_registry import Registry, RegistryError


def model(store: Store, n: int) -> Artifact:
    draft = store.draft(KeyParts("publish", 1, {"n": n}, {}))
    draft.write("model_index.json", f"{n}".encode())
    draft.write("unet/weights.safetensors", bytes(n))
    return draft.commit({}, {})


@pytest.fixture(params=["local", "memory"])
def registry(request: pytest.FixtureRequest, url_of: UrlOf) -> tuple[Store, Registry]:
    url = url_of(request.param)
    return Store(url), Registry(f"{url}/registry", "digits")


@pytest.fixture(params=["local", "memory", *REMOTE])
def any_registry(request: pytest.FixtureRequest, url_of: UrlOf) -> tuple[Store, Registry]:
    url = url_of(request.param)
    return Store(url), Registry(f"{url}/registry", "digits")


def test_versions_are_numbered_and_published_once(registry: tuple[Store, Registry]) -> None:
    store, found = registry
    names = [found.publish(model(store, n)).name for n in (1, 2, 1, 3)]
    assert names == ["v1", "v2", "v1", "v3"]
    assert [v.name for v in found.versions()] == ["v1", "v2", "v3"]
    assert found.fs.cat_file(f"{found.root}/v2/model_index.json") == b"2"


def test_a_version_without_its_manifest_is_none_and_is_overwritten(
    registry: tuple[Store, Registry],
) -> None:
    store, found = registry
    found.publish(model(store, 1))
    found.fs.rm_file(f"{found.root}/v1/manifest.json")
    assert found.versions() == []
    assert found.publish(model(store, 2)).name == "v1"
    assert found.fs.cat_file(f"{found.root}/v1/model_index.json") == b"2"


def test_the_champion_moves_and_rolls_back_step_by_step(
    any_registry: tuple[Store, Registry],
) -> None:
    store, found = any_registry
    assert found.champion() is None and found.last_move() is None
    for n in (1, 2, 3):
        found.promote(found.publish(model(store, n)).name)
    steps = [found.champion().name, found.rollback().name, found.rollback().name]
    assert steps == ["v3", "v2", "v1"]
    with pytest.raises(RegistryError, match="nothing is before it"):
        found.rollback()
    found.promote("v3")
    assert found.rollback().name == "v1"
    move = found.last_move()
    assert move is not None and (move["version"], move["why"]) == ("v1", "rolled back")
    assert found.was_champion("v2")
    assert not found.was_champion("v4")


def test_an_unknown_version_names_those_there(registry: tuple[Store, Registry]) -> None:
    store, found = registry
    found.publish(model(store, 1))
    with pytest.raises(RegistryError, match=r"no such version \(there are: v1\)"):
        found.promote("v9")
    with pytest.raises(RegistryError, match="no champion to roll back from"):
        found.rollback()


def test_a_damaged_champion_is_said_and_a_damaged_version_is_copied_again(
    any_registry: tuple[Store, Registry],
) -> None:
    store, found = any_registry
    artifact = model(store, 3)
    found.promote(found.publish(artifact).name)
    found.fs.pipe_file(f"{found.root}/v1/unet/weights.safetensors", b"xxx")
    assert found.publish(artifact).name == "v1"
    assert found.fs.cat_file(f"{found.root}/v1/unet/weights.safetensors") == bytes(3)
    found.fs.pipe_file(f"{found.root}/v1/manifest.json", b"{}")
    with pytest.raises(RegistryError, match="v1 is damaged"):
        found.champion()


def test_a_move_that_was_only_written_down_was_none(registry: tuple[Store, Registry]) -> None:
    store, found = registry
    found.promote(found.publish(model(store, 1)).name)
    found.publish(model(store, 2))
    moves = [*found.history(), {"version": "v2", "why": "published", "at": ""}]
    found.fs.pipe_file(f"{found.root}/history.json", json.dumps(moves).encode())
    assert not found.was_champion("v2")
    found.promote("v2")
    assert [move["version"] for move in found.history()] == ["v1", "v2"]
    assert found.was_champion("v2")


def test_a_champion_without_its_manifest_is_said(registry: tuple[Store, Registry]) -> None:
    store, found = registry
    found.promote(found.publish(model(store, 1)).name)
    found.fs.rm_file(f"{found.root}/v1/manifest.json")
    with pytest.raises(RegistryError, match="champion v1 is damaged"):
        found.champion()


def test_the_number_of_a_version_that_was_champion_is_not_given_again(
    registry: tuple[Store, Registry],
) -> None:
    store, found = registry
    for n in (1, 2):
        found.promote(found.publish(model(store, n)).name)
    found.fs.rm(f"{found.root}/v2", recursive=True)
    assert found.publish(model(store, 3)).name == "v3"


def test_asking_for_a_model_that_is_not_there_makes_no_folder(
    registry: tuple[Store, Registry],
) -> None:
    _, found = registry
    with pytest.raises(RegistryError, match="no such version"):
        found.promote("v1")
    with pytest.raises(RegistryError, match="no champion"):
        found.rollback()
    assert not found.fs.exists(found.root)


def test_a_damaged_history_is_said(registry: tuple[Store, Registry]) -> None:
    store, found = registry
    found.promote(found.publish(model(store, 1)).name)
    for damaged in (b"[", b"{}x", b"[{}]", b"[1]", b"1"):
        found.fs.pipe_file(f"{found.root}/history.json", damaged)
        with pytest.raises(RegistryError, match=r"history\.json is damaged"):
            found.was_champion("v1")


def test_a_registry_that_cannot_be_is_said_in_one_line() -> None:
    with pytest.raises(StoreError, match="foo://bar"):
        Registry("foo://bar", "digits")


def test_a_local_champion_is_a_folder_to_load_from(tmp_path: Path) -> None:
    store, found = Store(str(tmp_path)), Registry(str(tmp_path / "registry"), "digits")
    found.promote(found.publish(model(store, 1)).name)
    assert (tmp_path / "registry/digits/champion/model_index.json").read_bytes() == b"1"


def test_a_copy_that_is_cut_short_is_no_version(registry: tuple[Store, Registry]) -> None:
    store, found = registry
    artifact = model(store, 1)
    store.fs.rm_file(f"{artifact.path}/unet/weights.safetensors")
    with pytest.raises(FileNotFoundError):
        found.publish(artifact)
    assert found.versions() == []
