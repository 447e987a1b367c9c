"""Politeness to web hosts: robots.txt, limits per host across processes, Retry-After."""

import asyncio
import gzip
import selectors
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from loopback_server import LoopbackServer
from multidict import MultiDict

from configs.settings.download import Download
from tasks.download.body_memory import BodyMemory, Room
from tasks.download.event_loop import run
from tasks.download.fetch_with_robots_and_retries import Fetched, Fetcher, user_agent
from tasks.download.pace_requests_per_web_host import AsyncClock, HostLimits
from tasks.download.retryable_and_final_failures import FetchFailed
from tasks.download.robots_txt import MAX_AGE, RobotsCache, Rules
from tasks.download.row_fields_and_hash import Row
from tasks.download.safe_http_fetch import Admit, Deadline, parse_url
from tasks.download.source_protocol import ServedAt

pytestmark = pytest.mark.usefixtures("own_cache")


EXCLUDES = b"User-agent: *\nDisallow: /\n"


class Site:
    """A server on loopback with a robots.txt; it records its requests and their concurrency."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.agents: set[str] = set()
        self.clients: set[tuple[str, int]] = set()  # one per connection
        self.closing: list[bool] = []  # whether each request closes its connection
        self.robots: tuple[int, bytes, dict[str, str]] = (404, b"", {})
        self.statuses: list[tuple[int, dict[str, str]]] = []  # of the next pictures
        self.answering, self.most = 0, 0  # requests at once
        self.on_picture: Callable[[], object] = lambda: None
        self._lock = threading.Lock()
        site = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                with suppress(OSError):
                    site.answer(self)

        self.server = LoopbackServer(Handler)
        self.host = self.server.host

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        with self._lock:
            self.requests[handler.path] += 1
            self.agents.add(handler.headers["User-Agent"])
            self.clients.add(handler.client_address)
            self.closing.append(handler.headers["Connection"] == "close")
            self.answering += 1
            self.most = max(self.most, self.answering)
        status, body, headers = 200, b"picture", dict[str, str]()
        if handler.path == "/robots.txt":
            status, body, headers = self.robots
        else:
            self.on_picture()
            if self.statuses:
                status, headers = self.statuses.pop(0)
        with self._lock:
            self.answering -= 1
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    def pictures(self) -> int:
        """Requests for pictures."""
        return self.requests.total() - self.requests["/robots.txt"]


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    with site.server:
        yield site


def settings_for(site: Site, **settings: Any) -> Download:
    chosen = {"allow_hosts": (site.host,), "backoff": 0.0, "retries": 0, "timeout": 60.0}
    return Download(**{**chosen, "max_requests_per_host": None, **settings})


def outcomes(site: Site, *paths: str, **settings: Any) -> list[str]:
    """`ok` or the failure reason of each path, fetched at once by one shard."""
    fetcher = Fetcher(settings_for(site, **settings), ServedAt(f"http://{site.host}"))

    async def all_outcomes() -> list[str]:
        async with fetcher:
            return await asyncio.gather(*(outcome(fetcher, path) for path in paths))

    return run(all_outcomes())


async def outcome(fetcher: Fetcher, path: str) -> str:
    """`ok` or the failure reason of a path."""
    try:
        with Room(BodyMemory(10**6)) as room:
            await fetcher.get(Row(path, ("",)), room)
    except FetchFailed as failure:
        return failure.reason
    return "ok"


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
    assert site.closing[-1] and site.closing.count(True) <= 2, "the last request of each"


def test_a_hosts_only_row_uses_the_connection_of_its_robots_txt(site: Site) -> None:
    fetcher = Fetcher(settings_for(site), ServedAt())
    path = f"http://{site.host}/a"

    async def one() -> str:
        async with fetcher:
            fetcher.expect([Row(path, ("",))])
            return await outcome(fetcher, path)

    assert run(one()) == "ok"
    assert site.closing == [False, True]


def test_robots_txt_excludes_a_picture_before_any_request_of_it(site: Site) -> None:
    site.robots = (200, b"User-agent: *\nDisallow: /private\nAllow: /private/open\n", {})
    paths = ("a", "private/b", "private/open/c", "private/d")
    expected = ["ok", "robots.txt disallows", "ok", "robots.txt disallows"]
    assert outcomes(site, *paths) == expected
    assert site.requests == {"/robots.txt": 1, "/a": 1, "/private/open/c": 1}
    assert outcomes(site, "private/b", robots_txt=False) == ["ok"]


@pytest.mark.parametrize(
    ("coding", "packed", "expected"),
    [
        ("gzip", gzip.compress(EXCLUDES), "robots.txt disallows"),
        ("deflate", zlib.compress(EXCLUDES), "robots.txt disallows"),
        ("gzip", gzip.compress(EXCLUDES + b"#" * 2**20), "robots.txt disallows"),
        ("br", EXCLUDES, "robots.txt unavailable"),
        ("gzip", EXCLUDES, "robots.txt unavailable"),
    ],
    ids=["gzip", "deflate", "long", "unknown", "damaged"],
)
def test_a_packed_robots_txt_has_the_same_rules(
    site: Site, coding: str, packed: bytes, expected: str
) -> None:
    """Stores of packed files send them so, whatever a request accepts."""
    site.robots = (200, packed, {"Content-Encoding": coding})
    assert outcomes(site, "a") == [expected]
    assert site.pictures() == 0


def test_a_long_robots_txt_does_not_keep_the_loop_busy(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    matching, allows = set[str](), Rules.allows

    def recorded(self: Rules, url: str) -> bool:
        matching.add(threading.current_thread().name)
        return allows(self, url)

    monkeypatch.setattr(Rules, "allows", recorded)
    site.robots = (200, b"User-agent: *\n" + b"Disallow: /b\n" * 2000 + b"Disallow: /a\n", {})
    assert outcomes(site, "a", "c") == ["robots.txt disallows", "ok"]
    assert matching and "kiln-download" not in matching


def test_robots_txt_is_read_once_for_all_shards_and_kept_for_a_day(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        assert outcomes(site, *"abcdefgh") == ["ok"] * 8
    assert site.requests["/robots.txt"] == 1
    tomorrow = time.time() + MAX_AGE + 1
    monkeypatch.setattr("tasks.download.robots_txt.time.time", lambda: tomorrow)
    assert outcomes(site, "a") == ["ok"]
    assert site.requests["/robots.txt"] == 2


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (404, "ok"),
        (403, "ok"),
        (410, "ok"),
        (429, "robots.txt unavailable"),
        (500, "robots.txt unavailable"),
        (503, "robots.txt unavailable"),
    ],
)
def test_the_status_of_robots_txt_decides_without_its_rules(
    site: Site, status: int, reason: str
) -> None:
    site.robots = (status, b"User-agent: *\nDisallow: /\n", {})
    assert outcomes(site, "a", "b") == [reason, reason]
    assert site.pictures() == (2 if reason == "ok" else 0)
    assert site.requests["/robots.txt"] == 1
    site.robots = (200, b"", {})
    assert outcomes(site, "a") == ["ok"]  # an unavailable robots.txt is not kept


def test_an_unavailable_robots_txt_is_a_transient_failure() -> None:
    assert FetchFailed("robots.txt unavailable").transient
    assert FetchFailed("host asks to wait").transient
    assert FetchFailed("crawl delay too long").transient
    assert not FetchFailed("robots.txt disallows").transient


def test_robots_txt_of_a_redirect_has_the_rules_of_the_first_host(site: Site) -> None:
    other = Site()
    other.robots = (200, b"User-agent: *\nDisallow: /a\n", {})
    site.robots = (301, b"", {"Location": f"http://{other.host}/robots.txt"})
    with other.server:
        found = outcomes(site, "a", "b", allow_hosts=(site.host, other.host))
    assert found == ["robots.txt disallows", "ok"]
    assert (other.pictures(), site.pictures()) == (0, 1)


def test_robots_txt_of_a_private_address_is_not_read(site: Site) -> None:
    site.robots = (301, b"", {"Location": "http://169.254.169.254/robots.txt"})
    assert outcomes(site, "a") == ["refused address"]
    assert not site.pictures()


def test_a_picture_that_redirects_to_an_excluded_one_is_not_fetched(site: Site) -> None:
    site.robots = (200, b"User-agent: *\nDisallow: /private\n", {})
    site.statuses = [(302, {"Location": "/private/a"})]
    assert outcomes(site, "a") == ["robots.txt disallows"]
    assert site.requests == {"/robots.txt": 1, "/a": 1}


def test_only_the_first_half_megabyte_of_robots_txt_counts(site: Site) -> None:
    line = b"# a comment that fills this robots.txt up\n"
    rules = b"User-agent: *\nDisallow: /early\n", b"Disallow: /late\n"
    site.robots = (200, rules[0] + line * (2**20 // len(line)) + rules[1], {})
    assert outcomes(site, "early", "late") == ["robots.txt disallows", "ok"]


def test_rules_for_the_token_of_the_recipe_apply(site: Site) -> None:
    site.robots = (200, b"User-agent: kilnworks\nDisallow: /\n\nUser-agent: *\nAllow: /\n", {})
    assert outcomes(site, "a") == ["robots.txt disallows"]
    assert outcomes(site, "a", user_agent_token="Gallery") == ["ok"]
    assert Rules(b"\xef\xbb\xbfUser-agent: *\nDisallow: /\n", "me").allows("http://a/b") is False
    assert Rules(b"User-agent: *\nRequest-rate: 1/5\nCrawl-delay: 2\n", "me").delay == 5.0


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


@pytest.mark.parametrize(
    "line", [f"Request-rate: 1/{'9' * 400}", "Crawl-delay: 1e300"], ids=["request rate", "delay"]
)
def test_an_enormous_crawl_delay_is_a_day(line: str) -> None:
    assert Rules(f"User-agent: *\n{line}\n".encode(), "kilnworks").delay == 24 * 3600
    assert not Rules(f"User-agent: *\nDisallow: /a\n{line}\n".encode(), "k").allows("http://b/a")
    fast = f"User-agent: *\nRequest-rate: 1{'0' * 400}/9\n"
    assert Rules(fast.encode(), "kilnworks").delay == 0


def test_a_robots_txt_that_the_parser_refuses_fails_its_hosts_rows_alone(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(body: str) -> None:
        raise OverflowError

    site.robots = (200, b"User-agent: *\n", {})
    with monkeypatch.context() as patch:
        patch.setattr("protego.Protego.parse", refuse)
        assert outcomes(site, "a", "b") == ["robots.txt unavailable"] * 2
    assert outcomes(site, "a") == ["ok"]
    assert site.requests["/robots.txt"] == 2  # the refused one was not kept


def test_the_stages_own_server_has_no_robots_txt(site: Site) -> None:
    site.robots = (200, b"User-agent: *\nDisallow: /\n", {})
    served_at = ServedAt(f"http://{site.host}", (site.host,))
    fetcher = Fetcher(Download(max_requests_per_host=0.001), served_at)

    async def fetched() -> list[Fetched]:
        async with fetcher:
            with Room(BodyMemory(10**6)) as room:
                return [await fetcher.get(Row(path, ("",)), room) for path in "abc"]

    assert len(run(fetched())) == 3
    assert site.requests == {"/a": 1, "/b": 1, "/c": 1}


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
from tasks.download.pace_requests_per_web_host import HostLimits

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


def test_a_damaged_cache_of_robots_txt_is_read_around(tmp_path: Path, site: Site) -> None:
    folder = tmp_path / "cache" / "kilnworks"
    folder.mkdir(parents=True)
    (folder / "robots.sqlite").write_bytes(b"not a database" * 100)
    assert outcomes(site, "a") == outcomes(site, "b") == ["ok"]
    assert site.requests["/robots.txt"] == 2
    kept = RobotsCache(tmp_path / "robots.sqlite")
    kept.keep("http://a.org:80", b"User-agent: *\n")
    assert kept.read("http://a.org:80") == b"User-agent: *\n"
    assert kept.read("http://b.org:80") is None


def test_bodies_wait_for_memory_in_their_order() -> None:
    async def bodies() -> list[int]:
        memory, most, order = BodyMemory(100), [0], list[int]()

        async def body(number: int, size: int) -> None:
            with Room(memory) as room:
                await room.reserve(size)
                order.append(number)
                most.append(memory.used)
                await asyncio.sleep(0)

        sizes = (60, 60, 10, 500, 40, 40)
        await asyncio.gather(*(body(number, size) for number, size in enumerate(sizes)))
        assert memory.used == 0
        assert sorted(most)[-2] <= 100 and max(most) == 500  # a larger one is alone
        return order

    assert run(bodies()) == list(range(6))
