"""Versions are numbered, complete or absent; the champion moves forth and back."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from registries import crown, model, recorded_swaps
from store_servers import REMOTE, UrlOf
from waiting import at_once

from artifacts import compare_and_swap as cas
from artifacts.filesystems import subfolders
from artifacts.records import Damaged, first_fault
from artifacts.store import KeyParts, Store
from configs.errors import Refused
from tasks.publish import champion_alias
from tasks.publish import registry as publish_registry
from tasks.publish.registry import REPORT, Registry, registry_url


@pytest.mark.parametrize("kind", REMOTE)
def test_a_registry_deletes_versions_of_its_own_model_only(kind: str, url_of: UrlOf) -> None:
    """As a pattern, `[b]` matches `b`."""
    url = url_of(kind)
    store = Store(url)
    beside, own = (Registry(f"{url}/{name}", "digits") for name in ("b", "[b]"))
    for found in (beside, own):
        for n in (1, 2, 3):
            found.publish(model(store, n))
    own.fs.rm_file(f"{own.root}/v1/manifest.json")
    assert own.keep(1) == ["v2"]
    own.publish(model(store, 4))
    assert subfolders(own.fs, own.root) == ["v3", "v4"]
    kept = [(f"{beside.root}/{v.name}", v.manifest["files"]) for v in beside.versions()]
    assert [first_fault(beside.fs, *version) for version in kept] == [None] * 3


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_slash_at_the_end_of_a_store_leads_to_the_same_registry(url_of: UrlOf, kind: str) -> None:
    url = url_of(kind)
    assert registry_url(f"{url}/", None) == registry_url(url, None)
    assert Store(registry_url(url, None)).root == Store(f"{url}/registry").root
    assert registry_url(url, "s3://models") == "s3://models"


def test_versions_are_numbered_and_published_once(registry: tuple[Store, Registry]) -> None:
    store, found = registry
    names = [found.publish(model(store, n)).name for n in (1, 2, 1, 3)]
    assert names == ["v1", "v2", "v1", "v3"]
    assert [v.name for v in found.versions()] == ["v1", "v2", "v3"]
    assert found.fs.cat_file(f"{found.root}/v2/model_index.json") == b"2"


def test_a_version_registered_without_a_report_gets_it_later(
    registry: tuple[Store, Registry],
) -> None:
    store, found = registry
    artifact = model(store, 1)
    path = f"{found.root}/{found.publish(artifact).name}/{REPORT}"
    assert not found.fs.exists(path)
    for page, held in ((b"first", b"first"), (b"later", b"first")):
        store.fs.pipe_file(f"{artifact.path}/{REPORT}", page)
        assert found.publish(artifact).name == "v1"
        assert found.fs.cat_file(path) == held


def test_a_version_without_a_manifest_is_deleted_by_the_next_publication(
    registry: tuple[Store, Registry],
) -> None:
    store, found = registry
    found.publish(model(store, 1))
    found.fs.rm_file(f"{found.root}/v1/manifest.json")
    assert found.versions() == []
    assert found.publish(model(store, 2)).name == "v2"
    assert subfolders(found.fs, found.root) == ["v2"]


def test_old_versions_are_deleted_but_no_champion_that_a_rollback_restores(
    any_registry: tuple[Store, Registry],
) -> None:
    store, found = any_registry
    for n in range(1, 7):
        found.publish(model(store, n))
    for name in ("v1", "v3", "v4"):
        found.promote(name)
    found.rollback()  # v4 is no longer needed
    assert found.keep(2) == ["v2", "v4"]
    assert [version.name for version in found.versions()] == ["v1", "v3", "v5", "v6"]
    assert not found.fs.exists(f"{found.root}/v2/unet/weights.safetensors")
    assert found.rollback().name == "v1"
    assert found.publish(model(store, 9)).name == "v7"
    assert found.keep(9) == []


def test_of_many_champions_the_newest_and_the_one_before_the_champion_are_kept(
    registry: tuple[Store, Registry],
) -> None:
    """Each published version becomes the champion: all would stay, with their artifacts."""
    store, found = registry
    crown(store, found, *range(1, 8))
    assert found.keep(3) == ["v1", "v2", "v3", "v4"]
    assert found.rollback().name == "v6"
    assert found.keep(1) == [], "a rollback restores v5"
    assert found.rollback().name == "v5"
    with pytest.raises(Refused, match=r"no champion before v. is kept"):
        found.rollback()


@pytest.mark.parametrize("lost", ["deleted", "damaged"])
def test_the_version_that_a_rollback_restores_is_kept(
    registry: tuple[Store, Registry], lost: str
) -> None:
    """That is neither the champion once more nor a version that cannot be read."""
    store, found = registry
    for n in (1, 2, 3):
        found.publish(model(store, n))
    for name in ("v1", "v3", "v2", "v3"):
        found.promote(name)
    if lost == "deleted":
        found.fs.rm(f"{found.root}/v2", recursive=True)
    else:
        found.fs.pipe_file(f"{found.root}/v2/manifest.json", b"{}")
    assert found.keep(1) == []
    assert found.rollback().name == "v1"


def test_a_deletion_that_was_killed_is_completed_by_the_next(
    registry: tuple[Store, Registry],
) -> None:
    """The manifest is deleted first; each version was the champion."""
    store, found = registry
    crown(store, found, 1, 2, 3, 4)
    for name in ("v1", "v3"):
        found.fs.rm_file(f"{found.root}/{name}/manifest.json")
    found.publish(model(store, 5))
    assert not found.fs.exists(f"{found.root}/v1")
    assert found.fs.exists(f"{found.root}/v3"), "it was the champion before the present one"


def test_a_version_promoted_while_it_is_deleted_stays(
    registry: tuple[Store, Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, found = registry
    for n in (1, 2):
        found.publish(model(store, n))
    found.promote("v2")
    other = Registry(found.store.url, "digits")

    def promoted_first(*request: Any) -> bytes | None:
        other.promote("v1")
        return cas.remove(*request)

    monkeypatch.setattr(publish_registry, "remove", promoted_first)
    assert found.keep(1) == []
    champion = found.champion()
    assert champion is not None and champion.name == "v1"
    assert first_fault(found.fs, f"{found.root}/v1", champion.manifest["files"]) is None


def test_a_version_is_not_deleted_under_a_promotion_that_has_found_it(
    any_registry: tuple[Store, Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The promotion pauses after it has found the version, and `keep` deletes it meanwhile."""
    store, found = any_registry
    for n in (1, 2):
        found.publish(model(store, n))
    found.promote("v2")
    other, swap = Registry(found.store.url, "digits"), champion_alias.swap

    def paused(*given: Any) -> Any:
        monkeypatch.setattr(champion_alias, "swap", swap)
        assert other.keep(1) == ["v1"]
        return swap(*given)

    monkeypatch.setattr(champion_alias, "swap", paused)
    with pytest.raises(Refused, match="v1: no such version"):
        found.promote("v1")
    champion = found.champion()
    assert champion is not None and champion.name == "v2"
    assert [move["version"] for move in found.history().moves] == ["v2"]


def test_what_an_interrupted_copy_of_another_model_left_is_deleted(
    any_registry: tuple[Store, Registry],
) -> None:
    """Adapters beside the model_index.json of a pipeline would load as that pipeline."""
    store, found = any_registry
    found.publish(model(store, 1))
    found.fs.rm_file(f"{found.root}/v1/manifest.json")
    draft = store.draft(KeyParts("publish", 1, {"lora": True}, {}))
    draft.write("pytorch_lora_weights.safetensors", b"adapters")
    adapters = draft.commit({}, {})
    assert found.publish(adapters).name == "v2"
    names = {str(path).rpartition("/")[2] for path in found.fs.find(f"{found.root}/v2")}
    assert names == {"manifest.json", "pytorch_lora_weights.safetensors"}
    assert not found.fs.exists(f"{found.root}/v1/model_index.json")


def test_a_version_has_no_temporary_file_of_a_killed_publisher(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    found = Registry(f"{store.url}/registry", "digits")
    names = ("unet/weights.safetensors.0123.tmp", "manifest.json.4567.tmp")
    left = [Path(found.root, "v1", name) for name in names]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half of the wei")
    assert found.publish(model(store, 1)).name == "v2" and not any(map(Path.exists, left))


def test_the_error_for_an_unknown_version_lists_the_known_ones(
    registry: tuple[Store, Registry],
) -> None:
    store, found = registry
    found.publish(model(store, 1))
    with pytest.raises(Refused, match=r"no such version \(there are: v1\)"):
        found.promote("v9")
    with pytest.raises(Refused, match="no champion to roll back from"):
        found.rollback()


def test_a_damaged_champion_is_reported_and_a_damaged_version_is_published_anew(
    any_registry: tuple[Store, Registry],
) -> None:
    store, found = any_registry
    artifact = model(store, 3)
    found.promote(found.publish(artifact).name)
    found.fs.pipe_file(f"{found.root}/v1/unet/weights.safetensors", b"xxx")
    assert found.publish(artifact).name == found.publish(artifact).name == "v2"
    assert found.fs.cat_file(f"{found.root}/v2/unet/weights.safetensors") == bytes(3)
    assert not found.was_champion("v2"), "it replaces the damaged champion"
    found.fs.pipe_file(f"{found.root}/v1/manifest.json", b"{}")
    with pytest.raises(Refused, match="v1 is damaged"):
        found.champion()


def test_no_rollback_restores_the_damaged_copy_of_a_champion(
    registry: tuple[Store, Registry],
) -> None:
    store, found = registry
    crown(store, found, 1, 2)
    found.fs.pipe_file(f"{found.root}/v2/model_index.json", b"xxx")
    crown(store, found, 2)
    assert found.champion().name == "v3"
    assert found.keep(1) == ["v2"] and found.rollback().name == "v1"


@pytest.mark.parametrize("kind", ["memory", *REMOTE])
def test_a_file_that_arrives_late_changes_no_later_version(
    kind: str, url_of: UrlOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publisher's copy was under way when another one took its lock over, and its version."""
    store = Store(url_of(kind))
    found = Registry(f"{store.url}/registry", "digits")
    requests = recorded_swaps(monkeypatch, "artifacts.lock.swap")
    found.publish(model(store, 1))
    found.fs.rm(f"{found.root}/v1", recursive=True)  # its requests are still under way
    version = found.publish(model(store, 2))
    sent = [request for request in requests if "/v1/" in request[1]]
    assert version.name == "v1" and len(sent) == 4
    for request in sent:
        cas.swap(*request)
    root = f"{found.root}/v1"
    assert first_fault(found.fs, root, version.manifest["files"], deep=True) is None


@pytest.mark.slow
def test_concurrent_publishers_get_different_version_numbers(
    any_registry: tuple[Store, Registry],
) -> None:
    store, found = any_registry
    models = [model(store, n) for n in (1, 2, 3)]
    at_once(*(partial(found.publish, one) for one in [*models, *models]))
    versions = found.versions()
    assert [version.name for version in versions] == ["v1", "v2", "v3"]
    assert {v.manifest["digest"] for v in versions} == {one.digest for one in models}


def test_a_disk_error_while_numbering_overwrites_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, found = Store(str(tmp_path)), Registry(str(tmp_path / "registry"), "digits")
    found.publish(model(store, 1))
    other = model(store, 2)
    monkeypatch.setattr(LocalFileSystem, "exists", lambda *_: False)  # what it says of any error
    assert found.publish(other).name == "v2"


def test_a_damaged_file_of_an_artifact_is_not_published(
    any_registry: tuple[Store, Registry],
) -> None:
    store, found = any_registry
    artifact = model(store, 3)
    store.fs.pipe_file(f"{artifact.path}/unet/weights.safetensors", b"xxx")
    with pytest.raises(Damaged, match="is damaged"):
        found.publish(artifact)
    assert found.versions() == []


def test_a_model_rebuilt_with_other_bytes_is_a_version_of_its_own(
    registry: tuple[Store, Registry],
) -> None:
    store, found = registry
    found.publish(model(store, 3))
    found.fs.pipe_file(f"{found.root}/v1/model_index.json", b"x")
    draft = store.draft(KeyParts("publish", 1, {"n": 3}, {}))
    draft.write("model_index.json", b"other bytes")
    assert found.publish(draft.commit({}, {})).name == "v2"


def test_a_champion_without_a_manifest_is_reported(registry: tuple[Store, Registry]) -> None:
    store, found = registry
    crown(store, found, 1)
    found.fs.rm_file(f"{found.root}/v1/manifest.json")
    with pytest.raises(Refused, match="champion v1 is damaged"):
        found.champion()


def test_the_number_of_a_former_champion_is_not_reused(registry: tuple[Store, Registry]) -> None:
    store, found = registry
    crown(store, found, 1, 2)
    found.fs.rm(f"{found.root}/v2", recursive=True)
    assert found.publish(model(store, 3)).name == "v3"


def test_a_lookup_of_a_missing_model_creates_no_folder(registry: tuple[Store, Registry]) -> None:
    _, found = registry
    with pytest.raises(Refused, match="no such model in the registry"):
        found.promote("v1")
    with pytest.raises(Refused, match="no champion"):
        found.rollback()
    assert not found.fs.exists(found.root)


def test_an_invalid_registry_is_a_one_line_error() -> None:
    with pytest.raises(Refused, match="foo://bar"):
        Registry("foo://bar", "digits")


def test_an_interrupted_copy_is_no_version(registry: tuple[Store, Registry]) -> None:
    store, found = registry
    artifact = model(store, 1)
    store.fs.rm_file(f"{artifact.path}/unet/weights.safetensors")
    with pytest.raises(FileNotFoundError):
        found.publish(artifact)
    assert found.versions() == []
