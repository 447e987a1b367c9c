"""Commands on a store report damage and keep published models."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from artifacts.gc import record_run
from artifacts.store import Artifact, KeyParts, Store
from configs.errors import Away, Refused
from configs.load_recipe import dump_yaml
from flows.store_commands import (
    check_store,
    collect_garbage,
    list_store,
    show_artifact,
    verify_store,
)
from tasks.publish.registry import Registry


def model(store: Store, n: int = 1) -> Artifact:
    draft = store.draft(KeyParts("publish", 1, {"n": n}, {}))
    draft.write("model_index.json", b"{}")
    return draft.commit({}, {"created": "2026-01-01"})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


@pytest.fixture(params=["inside", "elsewhere"])
def registry(request: pytest.FixtureRequest, store: Store, tmp_path: Path) -> str:
    return f"{store.root}/registry" if request.param == "inside" else str(tmp_path / "models")


def given(store: Store, registry: str) -> str | None:
    """The value of `--registry`: None for the default location."""
    return None if registry.startswith(store.root) else registry


def test_bytes_that_two_kept_artifacts_share_count_once(
    store: Store, registry: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.bin").write_bytes(b"1234")
    shared = store.commit_shard("publish", "a", {".bin": str(tmp_path / "a.bin")}, {})
    found = Registry(registry, "digits")
    for n in (1, 2):
        draft = store.draft(KeyParts("publish", 1, {"n": n}, {}))
        draft.write("model_index.json", b"{}")
        draft.add_shard(shared)
        found.publish(draft.commit({}, {"created": "2026-01-01"}))
    collect_garbage(store.root, given(store, registry), days=1, hours=0, delete=False)
    kept, deleted = capsys.readouterr().out.splitlines()
    assert deleted == "nothing to delete"
    assert kept.startswith("kept: 2 artifacts ") and kept.endswith(": 8 B in finished artifacts")


def test_published_models_are_listed(
    store: Store, registry: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Registry(registry, "digits")
    found.promote(found.publish(model(store)).name)
    list_store(store.root, given(store, registry), as_json=False)
    assert f"digits v1  {registry}/digits/v1  champion" in capsys.readouterr().out


def test_an_unreadable_manifest_is_not_whole(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged, whole = model(store, 1), model(store, 2)
    assert verify_store(store.root, None)
    assert capsys.readouterr().out.splitlines()[-1] == "2 checked: all whole"
    store.fs.pipe_file(f"{damaged.path}/manifest.json", b"{}")
    capsys.readouterr()
    assert not verify_store(store.root, None)
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in told[:-1]] == [damaged.key[:12], whole.key[:12]]
    assert told[-1] == "2 checked: 1 damaged"
    assert "not a readable record" in told[0]
    assert told[1].endswith("whole")
    assert not verify_store(store.root, damaged.key[:12])
    assert verify_store(store.root, f"publish/{whole.key[:12]}")
    with pytest.raises(Refused, match=r"is damaged: .* not a readable record"):
        show_artifact(store.root, damaged.key[:12], as_json=False)


def test_a_file_that_may_not_be_read_does_not_end_the_other_checks(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, whole = model(store, 1), model(store, 2)
    opening = LocalFileSystem._open

    def refused(fs: LocalFileSystem, path: str, *given: Any, **options: Any) -> Any:
        if closed.key in path and path.endswith("model_index.json"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opening(fs, path, *given, **options)

    monkeypatch.setattr(LocalFileSystem, "_open", refused)
    assert not verify_store(store.root, None)
    told = {line.split()[1]: line for line in capsys.readouterr().out.splitlines()}
    assert "cannot be read: " in told[closed.key[:12]]
    assert told[whole.key[:12]].endswith("whole")


def test_what_is_deleted_while_it_is_read_is_not_damaged(
    store: Store, registry: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `kiln gc --delete`, and by a publication with `keep_versions`."""
    gone, whole, found = model(store, 1), model(store, 2), Registry(registry, "digits")
    for one in (gone, whole):
        found.promote(found.publish(one).name)
    opening = LocalFileSystem._open

    def deleted(fs: LocalFileSystem, path: str, *given: Any, **options: Any) -> Any:
        folder, _, name = path.rpartition("/")
        if name == "model_index.json" and folder in (gone.path, f"{found.root}/v1"):
            fs.rm(folder, recursive=True)
        return opening(fs, path, *given, **options)

    monkeypatch.setattr(LocalFileSystem, "_open", deleted)
    assert verify_store(store.root, None, given(store, registry))
    *told, count = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert told == [["publish", whole.key[:12], "whole"], ["model", "digits", "v2", "whole"]]
    assert count == ["2", "checked:", "all", "whole"]


def test_a_store_with_nothing_to_verify_is_an_error(store: Store, registry: str) -> None:
    with pytest.raises(Refused, match=f"nothing in {store.root}"):
        verify_store(store.root, None, given(store, registry))
    Registry(registry, "digits").publish(model(Store(f"{store.root}-other")))
    assert verify_store(store.root, None, given(store, registry))


def harm_history(found: Registry) -> None:
    (path,) = Path(found.root).glob("history.json.*")
    path.write_bytes(b"[")


@pytest.mark.parametrize("harm", ["file", "manifest", "no manifest", "history"])
def test_a_damaged_version_is_not_whole(store: Store, registry: str, harm: str) -> None:
    found = Registry(registry, "digits")
    found.promote(found.publish(model(store)).name)
    assert verify_store(store.root, None, given(store, registry))
    version = Path(found.root, "v1")
    if harm == "no manifest":
        (version / "manifest.json").unlink()
    elif harm == "history":
        harm_history(found)
    else:
        name = "manifest.json" if harm == "manifest" else "model_index.json"
        (version / name).write_bytes(b"[]")
    assert not verify_store(store.root, None, given(store, registry))


def test_a_published_artifact_is_not_garbage(store: Store, registry: str) -> None:
    kept, gone = model(store, 1), model(store, 2)
    Registry(registry, "digits").publish(kept)
    collect_garbage(store.root, given(store, registry), days=1, hours=0, delete=True)
    assert store.find("publish", kept.key) is not None
    assert store.find("publish", gone.key) is None


@pytest.mark.parametrize("harmed", ["manifest.json", "v1", "history"])
def test_nothing_is_deleted_while_a_version_is_unreadable(
    store: Store, registry: str, harmed: str
) -> None:
    kept = model(store)
    found = Registry(registry, "digits")
    found.promote(found.publish(kept).name)
    if harmed == "v1":
        found.fs.rm(f"{found.root}/v1", recursive=True)
    elif harmed == "history":
        harm_history(found)
    else:
        found.fs.pipe_file(f"{found.root}/v1/manifest.json", b"{}")
    with pytest.raises(Refused, match="nothing is deleted"):
        collect_garbage(store.root, given(store, registry), days=1, hours=0, delete=True)
    assert store.find("publish", kept.key) is not None


def test_a_collection_leaves_a_folder_of_other_programs_alone(tmp_path: Path) -> None:
    for name in ("a.tmp", "runs/b.tmp", "train/" + "0" * 64 + "/c"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    with pytest.raises(Refused, match="name the store by --store"):
        collect_garbage(str(tmp_path), days=0, hours=0, delete=True)
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 3


def test_a_store_that_is_a_file_or_missing_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Refused, match="it is a file: name a folder"):
        check_store(str(tmp_path / "file"))
    with pytest.raises(Refused, match="not found"):
        collect_garbage(str(tmp_path / "none"), days=0, hours=0, delete=False)
    with pytest.raises(Refused, match="it has no name"):
        check_store("")


@pytest.mark.parametrize("age", [{"days": float("nan")}, {"days": -1}, {"hours": float("nan")}])
def test_an_age_that_is_no_number_deletes_nothing(store: Store, age: dict[str, float]) -> None:
    """By NaN every run would be too old."""
    kept = model(store)
    with pytest.raises(Refused, match="give a number from 0 on"):
        collect_garbage(store.root, **{"days": 30.0, "hours": 0.0, **age}, delete=True)
    assert store.find("publish", kept.key) is not None


def test_a_collection_on_a_full_disk_says_what_to_do(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs a lock: "try `kiln gc`" would lead nowhere."""
    model(store)

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("artifacts.gc.hold", full)
    with pytest.raises(Away, match=r"no space left for its lock .*: delete any other file"):
        collect_garbage(store.root, days=0, hours=0, delete=True)


def test_a_registry_elsewhere_is_known_without_being_named(store: Store, tmp_path: Path) -> None:
    kept = model(store)
    Registry(str(tmp_path / "models"), "digits").publish(kept)
    collect_garbage(store.root, days=1, hours=0, delete=True)
    assert store.find("publish", kept.key) is not None
    (tmp_path / "models").rename(tmp_path / "unmounted")
    with pytest.raises(Refused, match="models is missing, so nothing is deleted: restore it"):
        collect_garbage(store.root, days=1, hours=0, delete=True)
    assert store.find("publish", kept.key) is not None


def test_the_lineage_of_a_published_model_is_kept_without_its_publish_artifact(
    store: Store,
) -> None:
    tuned = model(store, 2)
    draft = store.draft(KeyParts("publish", 1, {}, {}))
    draft.write("model_index.json", b"{}")
    parents = {"model": {"stage": "publish", "key": tuned.key}}
    made = draft.commit({}, {"created": "", "parents": parents})
    Registry(f"{store.root}/registry", "digits").publish(made)
    store.fs.rm(made.path, recursive=True)
    collect_garbage(store.root, days=1, hours=0, delete=True)
    assert store.find("publish", tuned.key) is not None


def test_garbage_that_is_not_a_day_old_stays(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    young = model(store)
    collect_garbage(store.root, days=1, hours=24, delete=True)
    assert store.find("publish", young.key) is not None
    kept, deleted = capsys.readouterr().out.splitlines()
    assert kept.startswith("kept: 0 artifacts ")
    assert "1 days need, and what changed in the last 24 hours (--days, --hours): " in kept
    assert deleted == "deleted 0 things, 0 B"


def test_an_artifact_is_listed_with_the_recipes_of_its_runs(
    store: Store, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    shared, alone, unused = (model(store, n) for n in range(3))
    long = "a name of two lines,\n\nthe second after an empty one, " + "long " * 30
    named = {"first": "digits", "second": long, "third": "digits"}
    for run, name in named.items():
        keys = [shared.key, alone.key] if run == "second" else [shared.key]
        recipe = dump_yaml({"name": name, "description": "name: none"})
        record_run(store, run, {"recipe": recipe, "stages": {"publish": keys}})
    record_run(store, "pictures", {"settings": {}, "stages": {"publish": [shared.key]}})  # earlier
    drawn = {"settings": {}, "model": "digits@v2", "stages": {"publish": [alone.key]}}
    record_run(store, "more pictures", drawn)

    def listed() -> dict[str, list[str]]:
        list_store(store.root, None, as_json=True)
        found = json.loads(capsys.readouterr().out)["artifacts"]
        return {one["key"]: one["recipes"] for one in found}

    assert listed() == {shared.key: [long, "digits"], alone.key: [long], unused.key: []}
    list_store(store.root, None, as_json=False)
    said = capsys.readouterr().out
    assert f"{unused.key[:12]}      1 files       2 B  2026-01-01\n" in said
    assert f"2026-01-01  {long}, of digits@v2\n" in said
    Path(store.root, "runs/first.json").write_bytes(b"{}")
    assert set(listed()) == {shared.key, alone.key, unused.key}
    assert "not every recipe is shown: " in caplog.text


def test_the_beginning_of_a_key_or_of_a_digest_names_an_artifact(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = model(store, 1), model(store, 2)
    draft = store.draft(KeyParts("train", 1, {}, {"base": "ab" * 32, "images": first.digest}))
    draft.write("weights", b"w")
    parents = {"images": {"stage": first.stage, "key": first.key}}
    made = draft.commit(
        {}, {"created": "", "host": "", "seconds": 0, "reason": "", "parents": parents}
    )

    def shown(what: str) -> str:
        show_artifact(store.root, what, as_json=False)
        return capsys.readouterr().out

    for name in (made.key[:12], made.digest, made.digest[:12], f"train/{made.digest[:12]}"):
        told = shown(name)
        assert told.startswith(f"train {made.key}")
    assert "    base abababababab\n" in told
    assert f"    images publish/{first.key[:12]}\n" in told
    assert verify_store(store.root, made.digest[:12])
    with pytest.raises(Refused, match=f"several begin with it .*{second.key[:12]}.*: give more"):
        shown("publish/")
    with pytest.raises(Refused, match=rf"an input of train/{made.key[:12]} \(base\)"):
        shown("abab")
    with pytest.raises(Refused, match="no artifact's key or digest begins with it; see `kiln"):
        shown("xyz")


def test_a_value_that_is_cut_says_so(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    draft = store.draft(KeyParts("train", 1, {"short": "s" * 198, "long": "l" * 199}, {}))
    made = draft.commit({}, {"created": "", "host": "", "seconds": 0, "reason": ""})
    show_artifact(store.root, made.key, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert f'    short: "{"s" * 198}"' in lines
    assert f'    long: "{"l" * 198}…' in lines
