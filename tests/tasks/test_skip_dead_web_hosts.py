"""Hosts that do not answer are skipped; where most do not, the network is down."""

from http.server import BaseHTTPRequestHandler

import pytest
from fetching import get_row
from loopback_server import refusing
from web_sites import reply, serving

from configs.settings.data import Download
from tasks.download.fetch_with_retries import Fetcher
from tasks.download.http import FetchFailed
from tasks.download.lists import ServedAt
from tasks.download.politeness import DeadHosts, is_outage
from tasks.download.rows import Row

pytestmark = pytest.mark.usefixtures("own_cache")


def test_a_host_that_redirects_to_a_dead_one_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[str] = []
    with refusing() as dead:

        def answer(handler: BaseHTTPRequestHandler) -> None:
            requested.append(handler.path)
            reply(handler, 302, Location=f"http://{dead}/")

        reasons = []
        with serving(answer) as host:
            limits = {"retries": 0, "max_host_failures": 2, "robots_txt": False}
            settings = {"allow_hosts": (host, dead), **limits}
            fetcher = Fetcher(Download.model_validate(settings), ServedAt(f"http://{host}/"))
            for number in range(4):
                with pytest.raises(FetchFailed) as failed:
                    get_row(fetcher, Row(f"{number}", ("",)))
                reasons.append(failed.value.reason)
    assert requested == ["/0", "/1", "/2", "/3"]
    assert reasons == ["connection refused"] * 2 + ["host does not answer"] * 2


def test_an_answer_of_any_status_resets_the_count_of_a_host() -> None:
    hosts = DeadHosts(limit=2)
    for reason in ("timeout", "http 503", "timeout", "http 404", "timeout", "timeout"):
        with pytest.raises(FetchFailed, match=reason), hosts.watch() as connects:
            connects("a.org:80")
            raise FetchFailed(reason)
    with pytest.raises(FetchFailed, match="host does not answer"), hosts.watch() as connects:
        connects("a.org:80")
    with hosts.watch() as connects:
        connects("a.org:443")


@pytest.mark.parametrize(
    ("failed", "outage"),
    [
        (["a"] * 8, False),  # most rows, one host
        (["a"] * 8 + ["b"], True),  # most rows and hosts
        (["b", "c"], False),  # most hosts, few rows
        ([], False),
    ],
)
def test_an_outage_affects_most_rows_and_most_hosts(failed: list[str], outage: bool) -> None:
    hosts = ["a"] * 8 + ["b", "c"]
    urls = [f"http://u:p@{host}/{n}" for n, host in enumerate(hosts)]
    reasons: list[str | None] = []
    for host in hosts:
        lost = host in failed
        failed = failed[1:] if lost else failed
        reasons.append("timeout" if lost else None)
    assert is_outage(urls, reasons, 0.5) is outage
    assert not is_outage(urls, ["http 404"] * 10, 0.0)
    assert not is_outage(urls, ["crawl delay too long"] * 10, 0.0)
