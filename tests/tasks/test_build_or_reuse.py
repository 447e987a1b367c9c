"""A stage has one builder, a reason of its build, and clear errors of its store."""

import errno
import logging
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import numpy as np
import pytest
from gcs_server import GcsServer
from store_servers import UrlOf
from waiting import wait_until

from artifacts.errors import classify, may_pass
from artifacts.lock import read_owner
from artifacts.records import put_atomic
from artifacts.store import Draft, KeyParts, Store
from configs.errors import Away, Failed, Refused
from tasks.build_or_reuse import StageResult, build_or_reuse, storing
from tasks.code_version import package_versions

SEVEN = f"changed: {', '.join(f'{name} null → true' for name in 'nopqrs')}, …"
SETTINGS = {"size": 32, "name": "a", "adam": {"rate": 1.0, "decay": 0.0}, "betas": [0.9, 0.99]}


@pytest.fixture
def store(tmp_path: Any) -> Store:
    return Store(str(tmp_path / "store"))


def parts(inputs: dict[str, str] | None = None, **settings: Any) -> KeyParts:
    return KeyParts("encode", 1, {**SETTINGS, **settings}, inputs or {"images": "1" * 64})


def write(draft: Draft) -> dict[str, Any]:
    draft.write("file", b"content")
    return {"files": 1}


def built(store: Store, wanted: KeyParts) -> str:
    """The reason of a build, as its manifest has it."""
    result = build_or_reuse(store, wanted, write, parents={})
    assert result.outcome == "built"
    artifact = store.load("encode", result.key)
    assert artifact is not None
    return str(artifact.manifest["run"]["reason"])


def test_a_parent_that_only_the_build_finds_is_in_the_lineage(store: Store) -> None:
    build_or_reuse(store, parts(), write, parents={})
    (other,) = store.artifacts()
    wanted = parts({"images": "2" * 64})
    result = build_or_reuse(
        store, wanted, lambda draft: write(draft) | {"parents": {"found": other}}, parents={}
    )
    made = result.load(store)
    assert made.manifest["run"]["parents"] == {"found": {"stage": "encode", "key": other.key}}
    assert made.summary == {"files": 1}


def test_a_rebuild_that_fails_leaves_no_artifact_with_files_of_two_builds(store: Store) -> None:
    build_or_reuse(store, parts(), write, parents={})
    (artifact,) = store.artifacts()
    store.fs.pipe_file(f"{artifact.path}/file", b"damaged")

    def fail(draft: Draft) -> dict[str, Any]:
        draft.write("file", b"newer")
        raise Refused("no more")

    with pytest.raises(Failed):
        build_or_reuse(store, parts(), fail, parents={})
    assert list(store.artifacts()) == []
    assert build_or_reuse(store, parts(), write, parents={}).outcome == "built"


def test_of_two_builders_one_builds_and_the_other_reuses(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    building, builds = threading.Event(), list[str]()

    def build(draft: Draft) -> dict[str, Any]:
        builds.append(threading.current_thread().name)
        building.set()
        # the other has found the lock taken
        wait_until(lambda: "is building it; waiting" in caplog.text)
        return write(draft)

    def run() -> StageResult:
        return build_or_reuse(store, parts(), build, parents={})

    with caplog.at_level(logging.INFO, "kiln"), ThreadPoolExecutor(2) as threads:
        first = threads.submit(run)
        assert building.wait(60)
        second = threads.submit(run)
        results = first.result(), second.result()
    assert [result.outcome for result in results] == ["built", "reused"]
    assert len(builds) == 1
    assert results[0].digest == results[1].digest


@pytest.mark.parametrize(
    ("host", "helps", "error"),
    [("another", True, None), ("another", True, OSError("no device")), (None, False, None)],
)
def test_the_second_builder_helps_a_builder_of_another_host(
    store: Store,
    host: str | None,
    helps: bool,
    error: Exception | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One that cannot help waits."""
    events, waits = list[str](), threading.Event()

    def build(draft: Draft) -> dict[str, Any]:
        assert waits.wait(60)
        events.append("built")
        return write(draft)

    def help_builder() -> None:
        events.append("helped")
        waits.set()
        if error is not None:
            raise error

    if host is not None:
        monkeypatch.setattr("socket.gethostname", lambda: host)
    with ThreadPoolExecutor(1) as threads, store.lock("encode", parts().key):
        monkeypatch.undo()
        second = threads.submit(
            build_or_reuse, store, parts(), write, parents={}, help_builder=help_builder
        )
        if helps:
            assert waits.wait(60)
        else:
            waits.set()
        build_lock_free = Draft(store, parts())
        build_lock_free.commit(build(build_lock_free), {})
    assert second.result().outcome == "reused"
    assert events == (["helped", "built"] if helps else ["built"])
    assert ("encode: cannot help, waits: no device" in caplog.text) == (error is not None)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"versions": {"Kilnworks": "aaaa"}}, "Kilnworks aaaa and this host bbbb"),
        ({}, "an older Kilnworks, which names no"),
        ({"versions": {"Kilnworks": "bbbb"}}, None),
    ],
    ids=["other", "older", "same"],
)
def test_a_host_with_other_code_than_the_builder_waits(
    store: Store,
    theirs: dict[str, Any],
    words: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its shards could have other bytes under the keys of the builder's; with its code it helps."""
    caplog.set_level(logging.INFO, "kiln")
    helped = list[bool]()
    given = {"help_builder": lambda: helped.append(True), "versions": lambda: {"Kilnworks": "bbbb"}}
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    with ThreadPoolExecutor(1) as threads, store.lock("encode", parts().key, facts=theirs):
        monkeypatch.undo()
        second = threads.submit(build_or_reuse, store, parts(), write, parents={}, **given)
        wait_until(lambda: helped if words is None else "is building it" in caplog.text)
    assert second.result().outcome == "built" and bool(helped) == (words is None)
    assert words is None or f"waiting, since it has {words}" in caplog.text


def test_the_lock_of_a_builder_has_its_code(store: Store) -> None:
    def build(draft: Draft) -> dict[str, Any]:
        owner = read_owner(store.fs, f"{draft.path}/lock.json") or {}
        assert owner["versions"] == {"Kilnworks": "bbbb"}
        return write(draft)

    def ours() -> dict[str, str]:
        return {"Kilnworks": "bbbb"}

    assert build_or_reuse(store, parts(), build, parents={}, versions=ours).outcome == "built"


def test_after_a_failed_build_the_next_one_builds(store: Store) -> None:
    def fail(draft: Draft) -> dict[str, Any]:
        draft.write("file", b"half")
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        build_or_reuse(store, parts(), fail, parents={})
    assert built(store, parts()) == "none was built before"


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (parts(size=64), "changed: size 32 → 64"),
        (parts(name="b"), "changed: name"),
        (parts(adam={"rate": 2.0, "decay": 0.0}), "changed: adam.rate 1.0 → 2.0"),
        (parts(adam={"rate": 1.0}), "changed: adam.decay 0.0 → null"),
        (parts(betas=[0.9, 0.95]), "changed: betas"),
        (parts({"images": "2" * 64}), "changed: images"),
        (parts(size=64, name="b"), "changed: name, size 32 → 64"),
        (parts(**dict.fromkeys("nopqrst", True)), SEVEN),
    ],
)
def test_the_reason_of_a_build_has_the_changes(store: Store, wanted: KeyParts, reason: str) -> None:
    assert built(store, parts()) == "none was built before"
    found = built(store, wanted).replace("inputs.", "").replace("settings.", "")
    assert found == reason.replace("changed", f"changed since {parts().key[:12]}")


def test_a_build_is_compared_with_the_most_similar_artifact_of_its_stage(store: Store) -> None:
    """The newest may be of another recipe; of equally similar ones, the newest counts."""
    other = {"size": 3, "betas": [], "name": "b"}
    for age, settings in ((20, {"size": 2}), (0, other), (10, {"size": 1}), (15, {"size": 4})):
        result = build_or_reuse(store, parts(**settings), write, parents={})
        then = time.time() - age
        os.utime(f"{store.root}/encode/{result.key}/manifest.json", (then, then))
    most_similar = parts(size=1).key[:12]
    assert built(store, parts()) == f"changed since {most_similar}: settings.size 1 → 32"


def test_the_reason_of_a_rebuild_is_the_damage(store: Store) -> None:
    result = build_or_reuse(store, parts(), write, parents={})
    store.fs.pipe_file(f"{store.root}/encode/{result.key}/file", b"other")
    assert built(store, parts()) == "it was damaged"


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.ENOSPC, Away, "no space left for /a/b: free some (try `kiln gc`), then run again"),
        (errno.EDQUOT, Away, "no space left for /a/b"),
        (errno.EACCES, Failed, "no permission for /a/b: grant it, or choose another folder or URL"),
        (errno.EROFS, Failed, "no permission for /a/b"),
    ],
)
def test_errors_of_a_full_or_closed_store_are_storage_errors(
    store: Store, number: int, kind: type[Exception], words: str
) -> None:
    def build(draft: Draft) -> dict[str, Any]:
        raise OSError(number, "as the system says", "/a/b")

    with pytest.raises(kind, match=words.replace("(", r"\(").replace(")", r"\)")):
        build_or_reuse(store, parts(), build, parents={})


def test_a_full_disk_is_that_of_the_copy_and_not_of_its_source(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's copies name the source first; writes name no file at all."""
    (tmp_path / "source").write_bytes(b"data")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "sendfile", full)
    with pytest.raises(Away, match=f"^no space left for {store.root}/there"), storing(store):
        put_atomic(store.fs, str(tmp_path / "source"), f"{store.root}/there")
    said = rf"^no space left for {store.root}, or for temporary files in {gettempdir()}: free some"
    with pytest.raises(Away, match=said), storing(store):
        full()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            MemoryError("Unable to allocate 6 GiB"),
            r"^this machine has too little memory: free some, raise the limit \(.*\), or have "
            "fewer processes run here at once, then run again",
        ),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), r"`ulimit -v`.*, then run again \(.*\)$"),
        (OSError(errno.EMFILE, "Too many open files"), "more files and connections.*`ulimit -n`"),
        (OSError(errno.ENFILE, "Too many open files"), r"`sysctl fs\.file-max`"),
        (OSError(errno.ENOBUFS, "No buffer space"), "lower download.max_connections"),
        (OSError(errno.EADDRNOTAVAIL, "Cannot assign"), "no free port"),
    ],
    ids=str,
)
def test_what_the_machine_lacks_is_told_and_waited_for(
    store: Store, error: Exception, said: str
) -> None:
    with pytest.raises(Away, match=said) as failed, storing(store):
        raise error
    assert may_pass(failed.value)


def test_a_full_disk_is_not_said_of_a_remote_store() -> None:
    """A training process has the name of its file in the text alone."""
    full = OSError(errno.ENOSPC, "No space left on device: '/cache/shard'")
    found = classify(full, "memory://bucket")
    assert isinstance(found, Away)
    assert str(found).startswith("no space left on this machine (")
    assert str(found).endswith("'/cache/shard'): free some, then run again")


@pytest.mark.slow
def test_a_forbidden_bucket_is_a_storage_error(
    gcs: GcsServer, url_of: UrlOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Store(url_of("gs"))
    monkeypatch.setattr(gcs, "forbidden", "^POST ")
    with pytest.raises(Failed, match=rf"^no permission for {bucket.url} \(Forb.*: grant it"):
        build_or_reuse(bucket, parts(), write, parents={})
    denied = PermissionError("Access Denied")  # as S3's client has it: without a number
    assert "(Access Denied): grant it" in str(classify(denied, bucket.url))


@pytest.mark.slow
def test_an_unreadable_artifact_of_a_bucket_is_not_rebuilt(
    gcs: GcsServer, url_of: UrlOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Store(url_of("gs"))
    build_or_reuse(bucket, parts(), write, parents={})
    with monkeypatch.context() as patch:
        patch.setattr(gcs, "forbidden", r"^GET .*/manifest\.json$")
        with pytest.raises(OSError, match=r"^Forbidden"):  # None would mean that there is none
            bucket.find(parts().stage, parts().key)
        with pytest.raises(Failed):
            build_or_reuse(bucket, parts(), lambda draft: pytest.fail("built"), parents={})
    assert build_or_reuse(bucket, parts(), write, parents={}).outcome == "reused"


@pytest.mark.slow
def test_an_unreachable_bucket_is_a_storage_error(url_of: UrlOf, s3_away: None) -> None:
    bucket = Store(url_of("s3"))
    with pytest.raises(Away, match=f"^{bucket.url} cannot be used now .*Could not connect"):
        build_or_reuse(bucket, parts(), write, parents={})


def test_other_errors_are_not_storage_errors(store: Store) -> None:
    away = ConnectionResetError(errno.ECONNRESET, "reset")
    assert classify(away, store.url) is away
    port = PermissionError(errno.EACCES, "Permission denied")
    assert classify(port) is port
    assert "no permission for /a" in str(classify(PermissionError(13, "", "/a")))


def test_wrong_input_of_ours_is_one_line_and_a_library_s_error_keeps_its_traceback(
    store: Store,
) -> None:
    def refuse(draft: Draft) -> dict[str, Any]:
        raise Refused("raise encode.resolution")

    def fail(draft: Draft) -> dict[str, Any]:
        return {"shape": np.zeros(3) + np.zeros(2)}

    with pytest.raises(Failed, match=r"^encode: raise encode\.resolution$"):
        build_or_reuse(store, parts(), refuse, parents={})
    with pytest.raises(ValueError, match="could not be broadcast"):
        build_or_reuse(store, parts(), fail, parents={})


def test_a_runtime_s_versions_are_those_of_its_own_environment(tmp_path: Path) -> None:
    folder = tmp_path / "lib/python3.11/site-packages/torch_xla-2.9.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Name: torch_xla\nVersion: 2.9.0\n", encoding="utf-8")
    wanted = ("torch_xla", "numpy")
    assert package_versions(str(tmp_path / "bin/python"), wanted) == {"torch_xla": "2.9.0"}
    assert package_versions(sys.executable, wanted)["numpy"] == np.__version__
