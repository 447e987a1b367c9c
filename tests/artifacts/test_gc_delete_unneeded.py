"""Garbage is what no published model, recent run or living builder needs, and nothing else."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gc_stores import DAY, age, collector, kinds, make, use
from store_servers import REMOTE, UrlOf

from artifacts.filesystems import files
from artifacts.gc import CONTINUED, Collector, Garbage, Marks, mark, needed_by, record_run
from artifacts.store import KeyParts, Store
from configs.errors import Refused


@pytest.fixture(params=["local", *REMOTE])
def store(request: pytest.FixtureRequest, url_of: UrlOf) -> Store:
    return Store(url_of(request.param))


def test_only_unreferenced_artifacts_are_garbage(store: Store) -> None:
    images, images2 = make(store, "download", 1), make(store, "download", 2)
    model = make(store, "train", 1, images=images)
    make(store, "train", 2, images=images2)
    use(store, "a-run", model)
    found = collector(store)
    items = list(found.garbage())
    assert kinds(items) == [
        ("download", "artifact"),
        ("download", "shard"),
        ("train", "artifact"),
        ("train", "shard"),
    ]
    assert list(found.delete(items)) == items
    assert store.find("train", model.key) is not None
    assert store.find("download", images.key) is not None
    assert [a.key for a in store.artifacts()] == [images.key, model.key]
    assert store.shard("download", "shard2") is None
    assert store.shard("download", "shard1") is not None
    assert list(collector(store).garbage()) == []


@pytest.mark.parametrize("kind", REMOTE)
def test_gc_deletes_nothing_of_a_store_that_its_own_url_matches_as_a_pattern(
    kind: str, url_of: UrlOf
) -> None:
    url = url_of(kind)
    beside, own = Store(f"{url}/run1"), Store(f"{url}/run[1]")
    for store in (beside, own):
        make(store, "train", 1)
    found = collector(own)
    assert len(list(found.delete(list(found.garbage())))) == 2
    assert list(files(own.fs, f"{own.root}/train/shards")) == []
    (kept,) = beside.artifacts()
    assert beside.fault(kept, deep=True) is None


def test_gc_keeps_what_a_live_builder_works_on(store: Store) -> None:
    parts = KeyParts("train", 1, {}, {})
    with store.lock("train", parts.key):
        store.draft(parts).write("half", b"1")
        assert list(collector(store).garbage()) == []
    assert kinds(collector(store).garbage()) == [("train", "unfinished")]


def test_gc_keeps_unfinished_artifacts_of_recent_runs_and_their_shards(store: Store) -> None:
    old = make(store, "download", 1)
    parts = KeyParts("download", 1, {}, {})
    record_run(store, "a-run", {"stages": {"download": [parts.key]}})
    store.draft(parts).write("half", b"1")
    found = collector(store)
    assert kinds(found.delete(list(found.garbage()))) == [("download", "artifact")]
    assert store.find("download", old.key) is None
    assert store.shard("download", "shard1") is not None


def test_gc_keeps_the_inputs_of_a_run_longer_than_the_retention(local: Store) -> None:
    images = make(local, "download", 1)
    parts = KeyParts("train", 1, {}, {})
    use(local, "a-run", images)
    record_run(local, "a-run", {"stages": {"train": [parts.key]}})
    age(local, 40 * DAY)
    with local.lock("train", parts.key):
        assert list(collector(local).garbage()) == []
    assert ("download", "artifact") in kinds(collector(local).garbage())


def test_gc_deletes_checkpoints_of_finished_training(store: Store) -> None:
    model = make(store, "train", 1)
    store.fs.makedirs(f"{model.path}/checkpoints", exist_ok=True)
    store.fs.pipe_file(f"{model.path}/checkpoints/step-1", b"12345")
    found = collector(store, model)
    items = list(found.garbage())
    assert [(item.kind, item.size) for item in items] == [("checkpoints", 5)]
    with store.lock("train", model.key):
        assert list(found.delete(items)) == []
    assert list(found.delete(items)) == items
    assert store.find("train", model.key) is not None
    assert not store.fs.exists(f"{model.path}/checkpoints")


def test_gc_keeps_artifacts_younger_than_a_day_and_their_shards(local: Store) -> None:
    old, young = make(local, "train", 1), make(local, "train", 2)
    age(local, 2 * DAY)
    Path(young.path, "data").touch()
    found = collector(local, min_age=DAY)
    assert kinds(found.delete(list(found.garbage()))) == [("train", "artifact"), ("train", "shard")]
    assert local.find("train", old.key) is None
    assert local.find("train", young.key) is not None


def test_gc_deletes_an_old_shard_file_with_its_last_artifact(store: Store, tmp_path: Path) -> None:
    older = make(store, "download", 1)
    (tmp_path / "again").write_bytes(b"downloaded again")
    newer = store.commit_shard("download", "shard1", {".tar": str(tmp_path / "again")}, {})
    assert list(collector(store, older).garbage()) == []
    draft = store.draft(KeyParts("download", 1, {}, {}))
    draft.add_shard(newer)
    artifact = draft.commit({}, {})
    found = collector(store, artifact)
    list(found.delete(list(found.garbage())))
    assert store.find("download", older.key) is None
    assert store.find("download", artifact.key) is not None
    assert store.shard("download", "shard1") == newer
    assert len(store.fs.ls(store.shards_path("download"))) == 2


def test_gc_deletes_nothing_that_is_not_of_the_store(store: Store) -> None:
    """A bucket without a prefix, or a folder of all data, has other things, too."""
    others = ["models/sdxl/unet.safetensors", "notes.tmp", f"books/{'a title ' * 8}/text"]
    others += [f"blobs/{'a' * 64}/{name}" for name in ("data", f"data.{'0' * 32}.tmp")]
    others += ["blobs/shards/0.tar", "blobs/locks/0"]
    for path in others:
        store.fs.makedirs(f"{store.root}/{path}".rpartition("/")[0], exist_ok=True)
        store.fs.pipe_file(f"{store.root}/{path}", b"x")
    found = collector(store)
    found._now += 400 * DAY
    assert list(found.garbage()) == []
    manifest = f"{store.root}/images/{'b' * 64}/manifest.json"
    store.fs.makedirs(manifest.rpartition("/")[0], exist_ok=True)
    store.fs.pipe_file(manifest, b"{}")
    with pytest.raises(Refused, match=r"manifest\.json"):
        list(found.garbage())


def test_gc_deletes_temporary_files_of_killed_processes(local: Store) -> None:
    model, part = make(local, "train", 1), "0123" * 8
    for path in (
        f"train/shards/shard1.tar.{part}.tmp",
        "train/shards/shard9.abc.tar",  # whose record was never written
        f"train/{model.key}/data.{part}.tmp",
        "train/locks/sha/shard9.json.3",
        f"runs/a-run.json.{part}.tmp",
        f"registry/digits/champion.{part}.tmp",
        f".probe-{part}",
    ):
        local.fs.makedirs(str(Path(local.root, path).parent), exist_ok=True)
        local.fs.pipe_file(f"{local.root}/{path}", b"x")
    age(local, 2 * DAY)
    found = collector(local, model, min_age=DAY)
    removed = list(found.delete(list(found.garbage())))
    assert sorted(item.kind for item in removed) == ["leftover"] * 6 + ["shard"]
    left = {str(p.relative_to(local.root)) for p in Path(local.root).rglob("*") if p.is_file()}
    assert {path for path in left if "0123" in path or "shard9" in path} == set()
    assert local.find("train", model.key) is not None


def test_gc_keeps_the_lock_of_a_shard_that_is_being_built(local: Store) -> None:
    model = make(local, "train", 1)
    with local.shard_lock("train", "shard9") as lock:
        age(local, 2 * DAY)
        lock.renew()
        found = collector(local, model, min_age=DAY)
        assert list(found.delete(list(found.garbage()))) == []
        lock.renew()
        lock.check()


def test_gc_deletes_an_old_lock_of_a_shard(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(store, "train", 1)
    with store.shard_lock("train", "shard9"):
        pass
    present = time.time() + 2 * DAY
    monkeypatch.setattr("artifacts.filesystems.present_time", lambda *_: present)
    found = collector(store, model, min_age=3 * DAY)
    assert kinds(found.delete(list(found.garbage()))) == [("train", "leftover")]
    assert list(files(store.fs, f"{store.root}/train/locks")) == []


def test_gc_deletes_unused_compiled_programs_and_staged_models(local: Store) -> None:
    for name in ("old", "new"):
        place = Path(local.root, "compiled/xla-2", name)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(b"program")
    keys = {name: digit * 64 for name, digit in {"old": "1", "new": "2", "half": "3"}.items()}
    for name, key in keys.items():
        Path(local.root, "models", key).mkdir(parents=True)
        Path(local.root, "models", key, "weights").write_bytes(b"12")
        Path(local.root, "models", key, "manifest.json").write_bytes(b"{}")  # no manifest of ours
        if name != "half":  # killed while it was being copied
            Path(local.root, "models", f"{key}.json").write_bytes(b"{}")
    age(local, 2 * DAY)
    age(local, 40 * DAY, f"models/{keys['old']}")
    for old in (f"models/{keys['old']}.json", "compiled/xla-2/old"):
        at = time.time() - 40 * DAY
        os.utime(Path(local.root, old), (at, at))
    found = collector(local, min_age=DAY)
    removed = list(found.delete(list(found.garbage())))
    assert sorted((i.kind, i.key[:3]) for i in removed) == [
        ("compiled", "old"),
        ("model", "111"),
        ("model", "333"),
    ]
    assert sorted(os.listdir(Path(local.root, "models"))) == [keys["new"], f"{keys['new']}.json"]
    assert os.listdir(Path(local.root, "compiled/xla-2")) == ["new"]


def test_gc_keeps_staged_models_during_a_build(local: Store) -> None:
    Path(local.root, "models", "1" * 64).mkdir(parents=True)
    Path(local.root, "models", "1" * 64, "weights").write_bytes(b"12")
    Path(local.root, "models", f"{'1' * 64}.json").write_bytes(b"{}")
    age(local, 40 * DAY)
    found = collector(local, min_age=DAY)
    items = list(found.garbage())
    assert [item.kind for item in items] == ["model"]
    with local.lock("train", "2" * 64):
        assert list(collector(local, min_age=DAY).garbage()) == []
        record_run(local, "a-run", {"stages": {"train": ["2" * 64]}})
        assert list(found.delete(items)) == []
    assert Path(local.root, "models", f"{'1' * 64}.json").exists()


@pytest.mark.parametrize(("stage", "deleted"), [("publish", True), ("train", False)])
def test_a_rejected_run_keeps_no_staged_model(local: Store, stage: str, deleted: bool) -> None:
    """Its publication stays unfinished; an unfinished training may still need the model."""
    Path(local.root, "models", "1" * 64).mkdir(parents=True)
    Path(local.root, "models", f"{'1' * 64}.json").write_bytes(b"{}")
    age(local, 40 * DAY)
    record_run(local, "rejected", {"stages": {stage: ["2" * 64]}})
    found = collector(local, min_age=DAY)
    kept = [item.kind for item in found.delete(list(found.garbage()))]
    assert kept == (["model"] if deleted else [])


def test_gc_deletes_nothing_if_a_record_is_damaged(local: Store) -> None:
    model = make(local, "train", 1)
    local.fs.pipe_file(f"{model.path}/manifest.json", b"{")
    with pytest.raises(Refused, match="rebuild it, or move"):
        needed_by(local, [("train", model.key)])
    with pytest.raises(Refused, match="its shards are unknown"):
        list(collector(local, min_age=DAY).garbage())
    record_run(local, "r1", {"stages": {}})
    local.fs.pipe_file(f"{local.root}/runs/r1.json", b"{")
    with pytest.raises(Refused, match="damaged"):
        collector(local)


def test_a_published_model_keeps_its_lineage_without_its_run(local: Store) -> None:
    images = make(local, "download", 1)
    model = make(local, "train", 1, images=images)
    published = make(local, "publish", 1, model=model)
    use(local, "a-run", images, model, published)
    age(local, 2 * DAY)

    def marked() -> Marks:
        return mark(local, [published.manifest], days=1)

    found = Collector(local, marked, days=1, min_age=0)
    assert kinds(found.delete(list(found.garbage()))) == [("runs", "run")]
    again = Collector(local, marked, days=1, min_age=0)
    assert list(again.garbage()) == []
    assert {a.stage for a in local.artifacts()} == {"download", "train", "publish"}


def test_weights_keep_their_inputs_but_not_what_they_continue(store: Store) -> None:
    """Otherwise a champion that is retrained every week keeps those of all weeks."""
    images = [make(store, "download", n) for n in (1, 2)]
    first = make(store, "train", 1, latents=images[0])
    second = make(store, "train", 2, latents=images[1], **{CONTINUED: first})
    deleted = collector(store, second).delete(list(collector(store, second).garbage()))
    assert kinds(deleted) == [("download", "artifact"), ("train", "artifact")]
    assert store.find("train", second.key) is not None
    assert store.find("download", images[1].key) is not None
    assert store.find("train", first.key) is None


@pytest.mark.parametrize("call", ["scandir", "stat", "lstat", "open"])
def test_an_io_error_ends_gc_with_nothing_deleted(
    local: Store, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A flaky disk: each call of a kind fails once, in turn."""
    model = make(local, "train", 1)
    use(local, "a-run", model)
    make(local, "train", 2)
    where: Any = __import__("builtins") if call == "open" else os
    really = getattr(where, call)
    calls = 0

    def flaky(fail: int) -> Callable[..., Any]:
        def act(*given: Any, **more: Any) -> Any:
            nonlocal calls
            if str(local.root) in str(getattr(given[0], "path", given[0])):
                calls += 1
                if calls == fail:
                    raise OSError(5, "Input/output error")
            return really(*given, **more)

        return act

    for fail in range(1, 400):
        calls = 0
        with monkeypatch.context() as patch:
            patch.setattr(where, call, flaky(fail))
            try:
                items: list[Garbage] = list(collector(local).garbage())
            except (OSError, Refused):
                continue
        assert kinds(items) == [("train", "artifact"), ("train", "shard")]
        if calls < fail:
            break
    else:
        pytest.fail("it never ends")
    assert fail > 3 or call == "lstat"
