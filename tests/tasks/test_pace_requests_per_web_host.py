"""The pace of requests to a web host: its limits, crawl delay and Retry-After, across processes."""

import asyncio
import selectors
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fetching import outcome, outcomes, settings_for
from multidict import MultiDict
from web_sites import Site

from configs.settings.data import Download
from tasks.download.fetch_with_retries import Fetcher, run
from tasks.download.http import Admit, Deadline, FetchFailed, parse_url
from tasks.download.lists import ServedAt
from tasks.download.politeness import AsyncClock, HostLimits

pytestmark = pytest.mark.usefixtures("own_cache")


def test_connections_to_a_host_are_limited(site: Site) -> None:
    site.on_picture = lambda: time.sleep(0.02)
    assert outcomes(site, *map(str, range(30)), max_connections_per_host=3) == ["ok"] * 30
    assert site.most <= 3


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop whose clock starts at 0 and jumps to the next timer instead of waiting."""

    def __init__(self) -> None:
        self.now = 0.0
        loop = self

        class Jumping(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
            def select(self, timeout: float | None = None) -> Any:
                loop.now += timeout or 0.0
                return super().select(0)

        super().__init__(Jumping())

    def time(self) -> float:
        return self.now


def starts(tmp_path: Path, count: int, *turn: Any) -> list[float]:
    """Times at which rows of one host start their requests, if all wait at once."""
    times: list[float] = []

    async def rows() -> None:
        now = asyncio.get_running_loop().time
        limits = HostLimits(tmp_path / "hosts.lock", AsyncClock(now))

        async def row() -> None:
            async with limits.turn("a.org", *turn):
                times.append(now())

        await asyncio.gather(*(row() for _ in range(count)))

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        runner.run(rows())
    return times


def test_requests_to_a_host_are_spaced_by_its_crawl_delay(tmp_path: Path) -> None:
    assert starts(tmp_path, 4, 8, None, 10.0) == pytest.approx([0, 10, 20, 30])


def test_requests_to_a_host_are_at_most_the_rate(tmp_path: Path) -> None:
    times = starts(tmp_path, 6, 2, 0.2)
    assert times == pytest.approx([0, 0, 10, 10, 20, 20]), "each of two slots is held for 10 s"


def starts_behind_a_full_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *urls: str, asked_to_wait: float = 0.0
) -> list[tuple[str, float]]:
    """Host and start of each request, if another one has the only connection for 25 seconds.

    A host gets a request per 10 seconds.

    Args:
        asked_to_wait: seconds that a.org asks for, after 5 seconds.
    """
    started: list[tuple[str, float]] = []

    async def rows() -> None:
        clock = AsyncClock(asyncio.get_running_loop().time)
        pace = {"max_connections_per_host": 1, "max_requests_per_host": 0.1}
        fetcher = Fetcher(Download(robots_txt=False, **pace), ServedAt(), clock)
        connections, hosts = asyncio.Semaphore(1), HostLimits(tmp_path / "hosts.lock", clock)
        fetcher.shared = replace(fetcher.shared, connections=connections, hosts=hosts)

        async def request(url: str, deadline: Deadline, *, admit: Admit, **_: Any) -> Any:
            target = parse_url(url)
            async with admit(target, deadline):
                started.append((target.host, clock.now()))
            return b"", MultiDict()

        monkeypatch.setattr(fetcher.client, "fetch", request)
        async with connections:
            fetches = [asyncio.create_task(outcome(fetcher, url)) for url in urls]
            await asyncio.sleep(5)
            hosts.wait_for("a.org", asked_to_wait)
            await asyncio.sleep(20)
        assert await asyncio.gather(*fetches) == ["ok"] * len(urls)

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        runner.run(rows())
    return started


def test_requests_are_spaced_by_their_starts_however_long_they_wait_for_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = (f"http://a.org/{n}" for n in range(3))
    found = starts_behind_a_full_connection(tmp_path, monkeypatch, *urls)
    assert found == [("a.org", pytest.approx(at)) for at in (25, 35, 45)]


def test_retry_after_holds_back_a_row_that_waits_for_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row that was asked to wait holds no connection meanwhile."""
    urls = ("http://a.org/1", "http://b.org/2")
    found = starts_behind_a_full_connection(tmp_path, monkeypatch, *urls, asked_to_wait=29.0)
    assert found == [("b.org", pytest.approx(25)), ("a.org", pytest.approx(34))]


def test_rows_that_a_crawl_delay_would_keep_too_long_are_transient_failures(site: Site) -> None:
    site.robots = (200, b"User-agent: *\nCrawl-delay: 400\n", {})

    async def two_rows() -> list[str]:
        fetcher = Fetcher(settings_for(site), ServedAt(f"http://{site.host}"))

        async with fetcher:
            tasks = [asyncio.create_task(outcome(fetcher, path)) for path in "abc"]
            done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            while len(done) < 2:
                done, waiting = await asyncio.wait(tasks, timeout=0.05)
            for task in waiting:
                task.cancel()
            return sorted(task.result() for task in done)

    assert run(two_rows()) == ["crawl delay too long", "ok"]
    assert site.pictures() == 1


LOCKED = """
import asyncio, sys
from pathlib import Path
from tasks.download.politeness import HostLimits

async def main():
    limits = HostLimits(Path(sys.argv[1]))
    async with limits.turn("a.org", 2), limits.turn("a.org", 2):
        print("held", flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


@pytest.mark.slow
def test_processes_of_a_machine_share_the_slots_of_a_host(tmp_path: Path) -> None:
    """A killed process leaves no slot behind."""
    file = tmp_path / "hosts.lock"
    command = [sys.executable, "-c", LOCKED, str(file)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None and other.stdout.readline() == b"held\n"
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            other.kill()
            other.wait()
        await asyncio.sleep(0)

    async def held() -> None:
        limits = HostLimits(file, AsyncClock(sleep=sleep))
        async with limits.turn("b.org", 2), limits.turn("b.org", 2):
            assert not slept
        async with limits.turn("a.org", 2), limits.turn("a.org", 2):
            assert len(slept) >= 3

    run(held())


def test_retry_after_stops_all_requests_to_the_host() -> None:
    now, slept = [100.0], list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    async def turns(limits: HostLimits) -> None:
        limits.wait_for("a.org", 7.0)
        async with limits.turn("b.org", 4):
            assert not slept
        async with limits.turn("a.org", 4), limits.turn("a.org", 4):
            assert slept == [7.0]
        limits.wait_for("a.org", 3600.0)
        with pytest.raises(FetchFailed, match="host asks to wait"):
            async with limits.turn("a.org", 4):
                pass

    limits = HostLimits(Path("/dev/null"), AsyncClock(lambda: now[0], sleep))
    run(turns(limits))


def test_a_refusal_with_retry_after_holds_back_the_other_rows_of_the_host(site: Site) -> None:
    site.statuses = [(429, {"Retry-After": "3600"})]
    found = outcomes(site, *"abcd", max_connections_per_host=1, robots_txt=False)
    assert Counter(found) == {"http 429": 1, "host asks to wait": 3}
    assert site.pictures() == 1
