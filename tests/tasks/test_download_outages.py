"""Outages and dead hosts: shards are deferred, the stage stops, or goes on without them."""

import errno
import re
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from download_stage import PICTURES, build, make_recipe, rows, rows_of
from loopback_server import refusing
from picture_server import Web
from store_servers import REMOTE, UrlOf

from artifacts.store import Store
from configs.errors import Away
from tasks import download
from tasks.download.download_on_beam import MOST_DEFERRED, THREADS, DownloadShard, _clear
from tasks.download.rows import Outage
from tasks.download.shard_plan import ShardSpec

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


@pytest.mark.parametrize("kind", REMOTE)
def test_notes_of_deferred_shards_are_deleted_in_a_store_with_a_bracket(
    kind: str, url_of: UrlOf
) -> None:
    store = Store(f"{url_of(kind)}/run[1]")
    store.fs.pipe_file(f"{store.root}/notes/a.json", b"{}")
    _clear(store, f"{store.root}/notes")
    assert not store.fs.exists(f"{store.root}/notes")


def test_an_outage_defers_shards_to_the_next_run(tmp_path: Path, web: Web) -> None:
    recipe = make_recipe(tmp_path, web, rows())
    folder = tmp_path / "store/download/shards"
    shards = download.plan(recipe).shards
    build(recipe)
    (folder / f"{shards[0].key}.json").unlink()
    (tar,) = folder.glob(f"{shards[1].key}.*.tar")
    tar.write_bytes(b"damaged" + tar.read_bytes()[7:])
    web.is_down = True
    with pytest.raises(Away, match=rf"2 of {len(shards)} shards .*\(http 503: \d+\)"):
        build(recipe)
    committed = {path.stem for path in folder.glob("*.json")}
    assert committed == {s.key for s in shards[2:]}
    web.is_down = False
    web.requests.clear()
    assert build(recipe).summary["images"] == PICTURES
    assert web.requests.total() == shards[0].rows + shards[1].rows


def test_a_machine_without_descriptors_ends_the_stage_and_loses_no_row(
    tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(tmp_path, web, rows(), deadline=0.6)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch, pytest.raises(Away, match="`ulimit -n`"):
        patch.setattr("tasks.download.http._Socket", refuse)
        build(recipe)
    assert not list((tmp_path / "store/download/shards").glob("*.json"))
    recipe = make_recipe(tmp_path, web, rows())
    assert build(recipe).summary["outcomes"] == {"success": PICTURES}


def test_an_outage_stops_the_stage_after_a_few_shards(tmp_path: Path, web: Web) -> None:
    recipe = make_recipe(tmp_path, web, rows(), retries=0, shard_size=1, max_host_failures=100)
    shards = len(download.plan(recipe).shards)
    assert shards > 2 * MOST_DEFERRED
    web.is_down = True
    words = (
        rf"stopped, since {MOST_DEFERRED} shards in a row .* of {shards} in all \(http 503: \d+\)"
    )
    with pytest.raises(Outage, match=words):
        build(recipe)
    assert web.requests.total() < MOST_DEFERRED + THREADS  # each thread may end what it had begun
    web.is_down = False
    assert build(recipe).summary["images"] == PICTURES


def test_shards_of_the_store_do_not_hide_an_outage(tmp_path: Path, web: Web) -> None:
    recipe = make_recipe(tmp_path, web, rows(), retries=0, shard_size=1)
    build(recipe)
    shards = [spec.key for spec in download.plan(recipe).shards]
    assert len(shards) > 2 * MOST_DEFERRED
    for key in shards[::2]:
        (tmp_path / f"store/download/shards/{key}.json").unlink()
    web.is_down = True
    with pytest.raises(Outage):
        build(recipe)


def test_a_shard_that_a_repeated_bundle_downloads_is_not_deferred(
    tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = DownloadShard.process

    def repeated(self: DownloadShard, spec: ShardSpec) -> Iterator[str]:
        web.is_down = True
        list(process(self, spec))
        web.is_down = False
        yield from process(self, spec)

    monkeypatch.setattr(DownloadShard, "process", repeated)
    recipe = make_recipe(tmp_path, web, rows(), retries=0, shard_size=100)
    assert build(recipe).summary["images"] == PICTURES


def test_a_committed_shard_whose_retry_is_deferred_is_an_outage(tmp_path: Path, web: Web) -> None:
    web.broken = {"3"}
    build(make_recipe(tmp_path, web, rows(), retries=0, shard_size=100))
    stricter = make_recipe(tmp_path, web, rows(), retries=0, shard_size=100, max_transient=0.0)
    with pytest.raises(Away, match=r"1 of 1 shards were deferred .*\(http 503: 1\)"):
        build(stricter, retry_failed=True)


class TwoOfThree(set[str]):
    """The numbers of two requests in three."""

    asked = 0

    def __contains__(self, _: object) -> bool:
        self.asked += 1
        return self.asked % 3 != 0


def test_a_shard_that_is_downloaded_ends_a_row_of_deferred_ones(tmp_path: Path, web: Web) -> None:
    recipe = make_recipe(tmp_path, web, rows(), retries=0, shard_size=1, max_host_failures=100)
    web.broken = TwoOfThree()
    with pytest.raises(Away, match=r"(\d+) of \d+ shards were deferred") as failure:
        build(recipe)
    assert int(re.findall(r"\d+", str(failure.value))[0]) > MOST_DEFERRED


@pytest.fixture
def dead() -> Iterator[str]:
    with refusing() as host:
        yield host


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """{port: connection attempts}"""
    counts: Counter[int] = Counter()
    connect = socket.socket.connect

    def counted(self: socket.socket, address: Any) -> None:
        counts[address[1]] += 1
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", counted)
    return counts


def test_a_dead_host_is_requested_a_few_times_and_the_stage_succeeds(
    tmp_path: Path, web: Web, dead: str, connections: Counter[int]
) -> None:
    lost = [{"url": f"http://{dead}/{n}", "caption": ""} for n in range(100)]
    alive = [{"url": f"http://{web.host}/good/{n}", "caption": ""} for n in range(PICTURES)] * 10
    listed = [*alive[:100], *lost, *alive[100:]]  # 30% are dead
    small = {"retries": 2, "backoff": 0.0, "max_host_failures": 10, "robots_txt": False}
    recipe = make_recipe(tmp_path, web, listed, shard_size=4 * len(listed), **small)
    summary = build(recipe).summary
    connected = recipe.download.max_connections
    assert 10 <= connections[int(dead.rpartition(":")[2])] < 10 + connected
    assert summary["images"] == len(alive)
    failed = {reason: n for reason, n in summary["outcomes"].items() if reason != "success"}
    assert failed.keys() <= {"host does not answer", "connection refused"}
    assert sum(failed.values()) == len(lost)
    assert failed["host does not answer"] > len(lost) - 10 - connected


def test_a_dead_host_is_requested_again_by_a_later_run(tmp_path: Path, web: Web) -> None:
    with Web() as away:
        pass
    lost = [{"url": f"http://{away.host}/good/{n}", "caption": ""} for n in range(8)]
    one = {"retries": 0, "max_connections": 1, "max_host_failures": 2, "robots_txt": False}
    recipe = make_recipe(tmp_path, web, [*rows(), *lost], shard_size=100, **one)
    first = build(recipe)
    expected = {"connection refused": 2, "host does not answer": 6, "success": PICTURES}
    assert first.summary["outcomes"] == expected
    assert [rows_of(first)[row["url"]]["attempts"] for row in lost] == [1] * 2 + [0] * 6
    with Web(away.server.server_port) as back:
        assert build(recipe, retry_failed=True).summary["images"] == PICTURES + len(lost)
        assert set(back.requests.values()) == {1} and len(back.requests) == len(lost)


def test_an_outage_of_most_hosts_is_deferred(tmp_path: Path, web: Web, dead: str) -> None:
    lost = [{"url": f"http://{dead}/{n}", "caption": ""} for n in range(2 * PICTURES)]
    recipe = make_recipe(tmp_path, web, [*rows(), *lost], retries=0, shard_size=1000, max_failed=1)
    assert build(recipe).summary["images"] == PICTURES  # one of two hosts is dead
    recipe = make_recipe(tmp_path, web, lost, retries=0, shard_size=1000, max_failed=1)
    with pytest.raises(Away, match=r"1 of 1 shards .*host does not answer: \d+"):
        build(recipe)


def test_a_list_with_many_dead_hosts_is_downloaded(tmp_path: Path, web: Web) -> None:
    web.broken = {str(n) for n in range(0, PICTURES, 3)}  # a third of every shard
    artifact = build(make_recipe(tmp_path, web, rows(), retries=0, shard_size=PICTURES))
    assert artifact.summary["images"] == PICTURES - len(web.broken)
