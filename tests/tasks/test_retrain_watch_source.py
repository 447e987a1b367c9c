"""A source has changed if the stamp of one of its files has."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from gcs_server import GcsServer
from loopback_server import LoopbackServer
from prefect.settings import PREFECT_API_URL, temporary_settings
from store_servers import S3Server

from artifacts.store import Store
from configs.errors import Away, Refused
from configs.load_recipe import load_recipe
from configs.settings.recipe import Recipe
from flows import watch_source as flow
from flows.retrain import _announced_again, one_at_a_time
from tasks.publish.stage import registry_of
from tasks.retrain.changes import is_retraining, last_stamp, remember, stamp
from tasks.stage import StageFailed

pytestmark = pytest.mark.slow


def recipe_of(tmp_path: Path, source: dict[str, Any]) -> Recipe:
    return load_recipe("digits", {"store": str(tmp_path / "store"), "source": source})


@pytest.mark.parametrize(
    "source",
    [
        {"kind": "urls", "format": "csv", "path": "lists"},
        {"kind": "folder", "path": "pictures"},
        {"kind": "folder", "path": "listed"},
    ],
)
def test_a_stamp_changes_with_a_file_of_the_source(tmp_path: Path, source: dict[str, Any]) -> None:
    names = {
        "lists": ["a.csv", "b.csv"],
        "pictures": ["a.png", "a.txt"],
        "listed": ["metadata.jsonl"],
    }
    folder = tmp_path / source["path"]
    folder.mkdir()
    files = [folder / name for name in names[source["path"]]]
    for file in files:
        file.write_text("url,caption\n")
    recipe = recipe_of(tmp_path, {**source, "path": str(folder)})
    found = [stamp(recipe.source), stamp(recipe.source)]
    for file in files:
        os.utime(file, (1, 1))  # another time, the same size
        found.append(stamp(recipe.source))
    assert found[0] == found[1] and len(set(found[1:])) == 1 + len(files)


def test_other_settings_of_a_source_are_another_stamp(tmp_path: Path) -> None:
    stamps = {stamp(recipe_of(tmp_path, {"kind": "digits", "count": n}).source) for n in (60, 90)}
    assert len(stamps) == 2


def test_a_stamp_is_remembered_in_the_registry(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, {"kind": "digits"})
    assert last_stamp(registry_of(recipe)) is None
    for found in ("one", "two"):
        remember(registry_of(recipe), found)
        assert last_stamp(registry_of(recipe)) == found


def test_after_an_outage_in_a_retraining_the_next_watch_repeats_its_event(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, {"kind": "digits"})
    for before, after in ((None, None), ("one", "")):
        if before is not None:
            remember(registry_of(recipe), before)
        with pytest.raises(Away), _announced_again(registry_of(recipe)):
            raise Away("away")
        assert last_stamp(registry_of(recipe)) == after
    remember(registry_of(recipe), "two")
    with _announced_again(registry_of(recipe)):
        pass
    with pytest.raises(StageFailed), _announced_again(registry_of(recipe)):
        raise StageFailed("wrong input")
    assert last_stamp(registry_of(recipe)) == "two"


def test_a_stamp_is_not_remembered_in_a_missing_bucket(
    gcs: GcsServer, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs, "absent", "buckte")
    for url in ("s3://buckte/store", "gs://buckte/store"):
        with pytest.raises(FileNotFoundError):
            remember(registry_of(load_recipe("digits", {"store": url})), "one")
    assert "buckte" not in Store("s3://buckte").fs.ls("")


def test_a_damaged_stamp_is_a_change(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, {"kind": "digits"})
    remember(registry_of(recipe), "one")
    (file,) = Path(recipe.store).glob("registry/*/watched.json.*")
    for data in (b'{"stamp', b"[]", b"{}", b"\xff"):
        file.write_bytes(data)
        assert last_stamp(registry_of(recipe)) is None
    remember(registry_of(recipe), "two")
    assert last_stamp(registry_of(recipe)) == "two"


class Events(BaseHTTPRequestHandler):
    """The part of a Prefect server that accepts events, without protection against CSRF."""

    accepted: list[dict[str, Any]]
    answer = 204

    def do_GET(self) -> None:
        self._say(404)

    def do_POST(self) -> None:
        events = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/api/events" and self.answer == 204:
            self.accepted += events
        self._say(self.answer if self.path == "/api/events" else 404)

    def _say(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Events]]:
    """The configured server; `accepted` has its events, and it refuses with another `answer`."""
    handler = type("Accepting", (Events,), {"accepted": []})
    monkeypatch.setattr(flow, "prepare_process", lambda: None)
    with (
        LoopbackServer(handler) as found,
        temporary_settings({PREFECT_API_URL: f"{found.url}/api"}),
    ):
        yield handler


def watch(store: str, count: int) -> dict[str, Any]:
    """The flow's report."""
    found: Any = flow.watch_source.fn("digits", {"store": store, "source.count": count})
    report: dict[str, Any] = found if isinstance(found, dict) else found.data
    return report


def test_a_change_is_remembered_only_after_the_server_accepted_its_event(
    tmp_path: Path, server: type[Events], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = str(tmp_path / "store")
    recipe = load_recipe("digits", {"store": store, "source.count": 60})
    with monkeypatch.context() as patch:
        patch.setattr(server, "answer", 400)
        with pytest.raises(Away, match=r"did not accept the event kiln\.source\.changed"):
            watch(store, 60)
    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        pytest.raises(Away, match="refused"),
    ):
        watch(store, 60)
    assert last_stamp(registry_of(recipe)) is None and server.accepted == []
    assert watch(store, 60)["changed"] and not watch(store, 60)["changed"]
    (event,) = server.accepted
    assert event["event"] == "kiln.source.changed"
    assert event["resource"] == {"prefect.resource.id": "kiln.source.digits"}
    assert event["payload"] == {"stamp": last_stamp(registry_of(recipe))}


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_change_that_cannot_be_remembered_is_not_announced(
    scheme: str,
    s3: S3Server,
    gcs: GcsServer,
    server: type[Events],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise each run of the flow would start a retraining."""
    monkeypatch.setattr(gcs, "absent", "misspelt")
    with pytest.raises(Refused, match="its bucket does not exist"):
        watch(f"{scheme}://misspelt/store", 60)
    assert server.accepted == []


@pytest.mark.extended
def test_a_change_during_a_retraining_is_announced_after_it(
    tmp_path: Path, server: type[Events]
) -> None:
    """Once, however often the source changes: each event starts a run that waits."""
    recipe, emitted = recipe_of(tmp_path, {"kind": "digits"}), server.accepted
    store = recipe.store
    assert watch(store, 60)["changed"] and not watch(store, 60)["changed"] and len(emitted) == 1
    with one_at_a_time(registry_of(recipe)):
        assert not watch(store, 60)["waits"], "nothing has changed"
        for _ in range(2):
            assert (watch(store, 90)["changed"], watch(store, 90)["waits"]) == (False, True)
    assert watch(store, 90)["changed"] and not watch(store, 90)["changed"]
    assert len({event["payload"]["stamp"] for event in emitted}) == len(emitted) == 2


def test_a_retraining_that_was_killed_delays_no_event(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, {"kind": "digits"})
    assert not is_retraining(registry_of(recipe)), "there is no registry yet"
    script = f"""
import os
from configs.load_recipe import load_recipe
from flows.retrain import one_at_a_time
from tasks.publish.stage import registry_of
with one_at_a_time(registry_of(load_recipe("digits", {{"store": {recipe.store!r}}}))):
    os._exit(0)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert not is_retraining(registry_of(recipe))
