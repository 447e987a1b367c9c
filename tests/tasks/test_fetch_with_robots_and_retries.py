"""Fetching rows: connections are kept, failures tried again, and bodies checked."""

import asyncio
import errno
import socket
import time
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from fetching import fetcher_of, get_row, outcome, outcomes, settings_for
from picture_server import picture
from web_sites import Site, reply, serving

from configs.settings.data import Download
from tasks.download.fetch_with_retries import Fetcher, run, user_agent
from tasks.download.http import FetchFailed
from tasks.download.http import _Socket as MadeSocket
from tasks.download.lists import ServedAt
from tasks.download.politeness import AsyncClock
from tasks.download.rows import Row

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("is_relative", [False, True])
def test_a_connection_is_kept_while_its_shard_has_more_rows_of_the_host(
    site: Site, is_relative: bool
) -> None:
    """A redirect and a retry are further requests of the same row."""
    fetcher = Fetcher(settings_for(site, retries=1), ServedAt(f"http://{site.host}"))
    paths = [f"{'' if is_relative else f'http://{site.host}/'}{number}" for number in range(5)]
    site.statuses = [(301, {"Location": "/moved"}), (200, {}), (503, {})]

    async def one_by_one() -> list[str]:
        async with fetcher:
            fetcher.expect([Row(path, ("",)) for path in paths])
            return [await outcome(fetcher, path) for path in paths]

    assert run(one_by_one()) == ["ok"] * 5
    assert len(site.clients) <= 3, "the bodies of the redirect and of the failure are not read"
    assert site.closing == [False] * 7 + [True], "robots.txt, and all requests but the last"


def test_rows_that_wait_for_a_turn_use_the_connections_of_others(site: Site) -> None:
    """All rows of a shard begin at once."""
    fetcher = Fetcher(settings_for(site, max_connections_per_host=2), ServedAt())
    paths = [f"http://{site.host}/{number}" for number in range(12)]

    async def at_once() -> list[str]:
        async with fetcher:
            fetcher.expect([Row(path, ("",)) for path in paths])
            return await asyncio.gather(*(outcome(fetcher, path) for path in paths))

    assert run(at_once()) == ["ok"] * 12
    assert len(site.clients) <= 3, "of robots.txt, and two"
    # A busy server may note the requests of two connections in another order than they were sent.
    assert 1 <= site.closing.count(True) <= 2, "the last request of each"


def test_a_hosts_only_row_uses_the_connection_of_its_robots_txt(site: Site) -> None:
    fetcher = Fetcher(settings_for(site), ServedAt())
    path = f"http://{site.host}/a"

    async def one() -> str:
        async with fetcher:
            fetcher.expect([Row(path, ("",))])
            return await outcome(fetcher, path)

    assert run(one()) == "ok"
    assert site.closing == [False, True]


def test_the_user_agent_has_the_contact_of_the_recipe(site: Site) -> None:
    page = "https://example.org/crawler"
    assert outcomes(site, "a", contact=page) == ["ok"]
    (agent,) = site.agents
    assert agent == user_agent(Download(contact=page))
    assert agent.startswith("Mozilla/5.0 (compatible; kilnworks/") and agent.endswith(f"+{page})")
    with pytest.raises(ValueError, match="contact"):
        Download(contact="me\r\nX-Injected: yes")


def test_a_dead_host_is_only_asked_for_its_robots_txt(site: Site) -> None:
    site.server.shutdown()
    site.server.server_close()
    assert outcomes(site, *"abcdef", retries=1) == ["host does not answer"] * 6


def test_transient_failures_are_retried_and_permanent_ones_are_not() -> None:
    tries: dict[str, int] = {}

    def answer(handler: BaseHTTPRequestHandler) -> None:
        tries[handler.path] = tries.get(handler.path, 0) + 1
        if handler.path == "/base/flaky" and tries[handler.path] == 3:
            reply(handler, body=picture(0))
        else:
            reply(handler, 404 if handler.path == "/base/gone" else 500, Retry_After="0")

    with serving(answer) as host:
        fetcher = fetcher_of(host)
        assert get_row(fetcher, Row("flaky", ("",)))[0] == picture(0)
        for url, outcome in {"gone": ("http 404", False), "broken": ("http 500", True)}.items():
            with pytest.raises(FetchFailed) as failed:
                get_row(fetcher, Row(url, ("",)))
            assert (failed.value.reason, failed.value.transient) == outcome
    assert tries == {"/base/flaky": 3, "/base/gone": 1, "/base/broken": 3}


def clock_of(slept: list[float]) -> AsyncClock:
    """A clock that only sleeps move, and that records them."""
    ahead = time.monotonic() + 1000.0  # ahead of the real clock, so no request times out

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    return AsyncClock(lambda: ahead + sum(slept), sleep)


def test_each_retry_waits_twice_as_long_as_the_one_before() -> None:
    slept: list[float] = []
    with serving(lambda h: reply(h, 503)) as host:
        fetcher = fetcher_of(host, clock_of(slept), backoff=1.0, retries=3)
        with pytest.raises(FetchFailed, match="http 503"):
            get_row(fetcher, Row("a", ("",)))
    assert slept == [pytest.approx(seconds, rel=0.25) for seconds in (1.0, 2.0, 4.0)]
    assert len(set(slept)) == len({seconds / 2**n for n, seconds in enumerate(slept)}) == 3


@pytest.mark.parametrize("lacking", [OSError(errno.EMFILE, "Too many open files"), MemoryError()])
def test_a_machine_that_lacks_something_for_a_moment_loses_no_row(
    lacking: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    failures = [lacking] * 3

    def make_socket(*arguments: int, **options: Any) -> socket.socket:
        if failures:
            raise failures.pop()
        return MadeSocket(*arguments, **options)

    monkeypatch.setattr("tasks.download.http._Socket", make_socket)
    with serving(lambda h: reply(h, body=picture(0))) as host:
        fetched = get_row(fetcher_of(host, clock_of(slept), retries=0), Row("a", ("",)))
    assert fetched.body == picture(0)
    assert fetched.attempts == 1
    assert slept == [pytest.approx(seconds, rel=0.25) for seconds in (0.5, 1.0, 2.0)]


def test_a_machine_that_lacks_something_until_the_deadline_fails_no_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []

    def make_socket(*_: int, **__: Any) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("tasks.download.http._Socket", make_socket)
    with pytest.raises(OSError, match="Too many open files"):
        get_row(fetcher_of("127.0.0.1:9", clock_of(slept), deadline=20.0), Row("a", ("",)))
    assert 10.0 < sum(slept) < 20.0


def test_retry_after_is_respected_within_the_deadline() -> None:
    slept: list[float] = []
    requested: list[str] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        requested.append(handler.path)
        reply(handler, 429, Retry_After="7" if len(requested) == 1 else "3600")

    with serving(answer) as host:
        fetcher = fetcher_of(host, clock_of(slept), deadline=20.0)
        with pytest.raises(FetchFailed, match="http 429"):
            get_row(fetcher, Row("a", ("",)))
    assert slept == [7.0]
    assert len(requested) == 2  # the second answer exceeds the deadline


def test_a_picture_that_changed_is_refused_by_its_sha256() -> None:
    with (
        serving(lambda h: reply(h, body=picture(0))) as host,
        pytest.raises(FetchFailed, match="sha256 differs"),
    ):
        get_row(fetcher_of(host), Row("a", ("",), "0" * 64))
