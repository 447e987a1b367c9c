"""An outage of a source's web server or store is retried; what it lacks or forbids is final."""

import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientConnectorDNSError
from botocore.exceptions import NoCredentialsError
from loopback_server import refusing
from source_rows import make_recipe, many_rows, parquet, png, write_list
from web_sites import reply, serving

from artifacts.errors import may_pass
from configs.errors import Away, Refused
from tasks import download
from tasks.download.source_files import reading

pytestmark = pytest.mark.usefixtures("own_cache")
Failure = Callable[[BaseHTTPRequestHandler, int, bytes], None]


def busy(handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
    reply(handler, 503)


def reset(handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)


def cut(handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
    reply(handler, status, body[: len(body) // 2], Content_Length=str(len(body)))


class Lists:
    """Answers with a file, or a range of it, until the failure begins."""

    def __init__(self, content: bytes, failure: Failure, after: float) -> None:
        self.content, self.failure, self.after, self.requests = content, failure, after, 0

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
        status, body, headers = 200, self.content, {"Accept_Ranges": "bytes"}
        if wanted := handler.headers["Range"]:
            first, last = (int(n or len(body)) for n in wanted.removeprefix("bytes=").split("-"))
            whole, body, status = len(body), body[first : last + 1], 206
            headers["Content_Range"] = f"bytes {first}-{first + len(body) - 1}/{whole}"
        self.requests += 1
        if self.requests > self.after:
            self.failure(handler, status, body)
        else:
            reply(handler, status, body, **headers)


@pytest.mark.parametrize("failure", [busy, reset, cut])
@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_an_outage_of_a_list_s_web_server_may_pass_at_each_request(
    tmp_path: Path, kind: str, failure: Failure
) -> None:
    """fsspec calls some of its answers a missing file, and DuckDB others a malformed one."""
    rows = [{**row, "caption": "a"} for row in many_rows(3000)]
    content = Path(write_list(tmp_path / f"a.{kind}", rows)).read_bytes()
    for after in count():
        with serving(Lists(content, failure, after)) as host:
            source = {"kind": "urls", "path": f"http://{host}/a.{kind}", "format": kind}
            try:
                download.plan(make_recipe(source, tmp_path / f"{after}"))
            except Away as error:
                assert may_pass(error)
                words = f"source: {source['path']}: cannot be read now ("
                assert str(error).startswith(words) and str(error).endswith("): run again later")
                assert "Traceback" not in str(error) and "\n" not in str(error)
            else:
                break
    assert after > 5


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_what_a_web_server_lacks_or_forbids_is_final(tmp_path: Path, status: int) -> None:
    for after in (0, 5):
        content = parquet([{"url": "a", "caption": ""}])
        lists = Lists(content, lambda handler, *_: reply(handler, status), after)
        with serving(lists) as host, pytest.raises(Refused) as found:
            source = {"kind": "urls", "path": f"http://{host}/a.parquet"}
            download.plan(make_recipe(source, tmp_path / "store"))
        assert "no such file" in str(found.value) or f": {status}, " in str(found.value)


def test_a_web_server_that_nobody_reaches_may_come_back() -> None:
    with refusing() as host:
        for kind in ("urls", "folder", "tars", "dataset"):
            url = f"http://user:secret@{host}/a.parquet?signature=secret"
            words = r"a\.parquet\?signature=\.\.\.: cannot be read now \(Cannot connect"
            with pytest.raises(Away, match=words) as found:
                download.check(make_recipe({"kind": kind, "path": url}))
            assert "secret" not in str(found.value)


def test_an_outage_while_pictures_are_copied_may_pass(tmp_path: Path) -> None:
    """In a worker of Beam, which keeps the text of errors alone."""
    content = parquet([{"image": png(n), "text": ""} for n in range(8)])
    lists = Lists(content, busy, after=float("inf"))
    with serving(lists) as host:
        source = {"kind": "dataset", "path": f"http://{host}/a.parquet", "image_column": "image"}
        recipe = make_recipe({**source, "caption_column": "text"}, tmp_path / "store")
        download.plan(recipe)
        plan, lists.after = download.plan(recipe), 0
        stage = download.DownloadStage(recipe, plan)
        draft = plan.artifact.store.draft(stage.parts)
        with pytest.raises(Away, match=r"^source: http://.*: cannot be read now \(503"):
            stage.build(draft, lambda *_: None)


def test_an_outage_is_no_folder_without_pictures(tmp_path: Path) -> None:
    """A file that cannot be opened now is not left out, as a missing one is."""
    pictures = {"/p/": b'<a href="a.png">', "/p/a.png": png(1)}
    listed = {"/p/": b'<a href="a.png"><a href="metadata.jsonl">'}
    away = set[str]()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        body = pictures.get(handler.path, b"")
        if handler.path in away:
            reply(handler, 503)
        elif handler.path == "/p/":
            reply(handler, 200, body, Content_Type="text/html")
        else:
            reply(handler, 200 if body else 404, body)

    with serving(answer) as host:
        recipe = make_recipe({"kind": "folder", "path": f"http://{host}/p/"}, tmp_path / "store")
        assert download.plan(recipe).rows == 1
        for path in ("/p/a.png", "/p/a.txt", "/p/", "/p/metadata.jsonl"):
            away = {path}
            pictures |= listed if path == "/p/metadata.jsonl" else {}
            recipe = make_recipe(recipe.source.model_dump(), tmp_path / f"store{path}")
            with pytest.raises(Away, match="cannot be read now"):
                download.plan(recipe)


def test_a_source_without_credentials_says_how_to_log_in() -> None:
    words = "cannot be read now .*locate credentials.: log in by its cloud's tool, or set"
    with pytest.raises(Away, match=words), reading("s3://bucket/list.parquet"):
        raise NoCredentialsError


def test_a_host_without_an_address_may_be_misspelt() -> None:
    key: Any = SimpleNamespace(host="exmaple.org", port=443, ssl=True)
    unknown = OSError(socket.EAI_NONAME, "Name or service not known")
    words = r"exmaple\.org:443 .*: correct the host's name, or run again later$"
    with pytest.raises(Away, match=words), reading("https://exmaple.org/a.csv"):
        raise FileNotFoundError from ClientConnectorDNSError(key, unknown)
