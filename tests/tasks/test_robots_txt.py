"""robots.txt: what it excludes, when it is read again, and where it cannot be read."""

import gzip
import threading
import time
import zlib
from pathlib import Path

import pytest
from fetching import outcomes
from web_sites import Site

from configs.settings.data import Download
from tasks.download.fetch_with_retries import Fetched, Fetcher, run
from tasks.download.http import BodyMemory, FetchFailed, Room
from tasks.download.lists import ServedAt
from tasks.download.politeness import MAX_AGE, RobotsCache, Rules
from tasks.download.rows import Row

pytestmark = pytest.mark.usefixtures("own_cache")


EXCLUDES = b"User-agent: *\nDisallow: /\n"


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
    monkeypatch.setattr("tasks.download.politeness.time.time", lambda: tomorrow)
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


@pytest.mark.parametrize("is_first", [True, False])
def test_each_host_of_a_shard_has_the_rules_of_its_own_robots_txt(
    site: Site, is_first: bool
) -> None:
    other = Site()
    other.robots = (200, EXCLUDES, {})
    hosts = (other.host, site.host) if is_first else (site.host, other.host)
    paths = [f"http://{host}/{name}" for name in "ab" for host in hosts]
    with other.server:
        found = outcomes(site, *paths, allow_hosts=hosts)
    excluded = {path for path in paths if other.host in path}
    expected = ["robots.txt disallows" if path in excluded else "ok" for path in paths]
    assert found == expected
    assert (other.pictures(), site.pictures()) == (0, 2)
    assert other.requests["/robots.txt"] == site.requests["/robots.txt"] == 1


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
