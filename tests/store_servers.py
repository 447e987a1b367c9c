"""Servers of remote stores and of the hub on loopback, for their real clients."""

from __future__ import annotations

import logging
import os
import re
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from gcs_objects import Refused
from gcs_server import GcsServer
from hub_server import HubServer

BUCKET = "bucket"
#: Starts of the headers of S3's newer checksums.
NEW_HEADERS = ("x-amz-checksum-", "x-amz-sdk-checksum-", "x-amz-trailer")
UrlOf = Callable[[str], str]
RequestsTo = Callable[[str], list[tuple[str, str]]]
#: Kinds of stores that other machines see, each behind a server.
REMOTE = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("s3", "gs")]

# No client looks for anybody's credentials, or asks a cloud's own servers for them.
os.environ |= {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_SECRET_ACCESS_KEY": "tests",
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "FSSPEC_GS_TOKEN": "anon",
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
}


@pytest.fixture(scope="session")
def gcs() -> Iterator[GcsServer]:
    """Google Cloud Storage: any `gs://<bucket>`, here and in processes that inherit from us."""
    with GcsServer() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", server.url)
        yield server


class S3Server(logging.Handler):
    """Where moto's server is; `requests` has the (method, path) of each request so far."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.requests: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line of the server's log."""
        if asked := re.search(r"([A-Z]+) (/[^ ?]*)", record.getMessage()):
            self.requests.append((asked[1], asked[2]))


@contextmanager
def serving_s3() -> Iterator[S3Server]:
    """A server that answers, with a bucket."""
    from moto.s3.responses import S3Response
    from moto.server import ThreadedMotoServer  # half a second, which unit tests do without

    alone, put = threading.Lock(), S3Response.put_object

    def put_object(response: S3Response) -> object:
        with alone:  # moto checks a condition, then writes; S3 does both at once
            return put(response)

    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    log = logging.getLogger("werkzeug")
    moto.start()
    host, port = moto.get_host_and_port()
    server = S3Server(f"http://{host}:{port}")
    urllib.request.urlopen(urllib.request.Request(f"{server.url}/{BUCKET}", method="PUT")).close()
    log.setLevel(logging.INFO)
    log.addHandler(server)
    log.propagate = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S3Response, "put_object", put_object)
        yield server
    log.removeHandler(server)
    moto.stop()


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """Amazon's S3, with a bucket: here and in processes that inherit from us."""
    with serving_s3() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", server.url)
        yield server


@pytest.fixture
def s3_of_before_2025(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 as stores have it that know none of the checksums which botocore adds since 2025."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication as Moto
    from werkzeug.wrappers import Request, Response

    answer = Moto.__call__

    def refuse(moto: Moto, environ: dict[str, Any], start: Any) -> Any:
        headers = Request(environ).headers
        known = not any(name.lower().startswith(NEW_HEADERS) for name in dict(headers))
        if known and "aws-chunked" not in headers.get("Content-Encoding", ""):
            return answer(moto, environ, start)
        return Response("<Error><Code>NotImplemented</Code></Error>", 501)(environ, start)

    monkeypatch.setattr(Moto, "__call__", refuse)


@pytest.fixture
def s3_away(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody answers where S3 is."""
    from artifacts.s3_client import S3

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    S3.clear_instance_cache()
    yield
    S3.clear_instance_cache()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The hub, here and in processes that inherit from us: nothing in it, nobody logged in."""
    from huggingface_hub import HfFileSystem, constants

    with HubServer() as server:
        where = {
            "ENDPOINT": server.url,
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_TOKEN_PATH": str(tmp_path / "hub-token"),
        }
        for name, value in where.items():  # which the client reads once, when it is imported
            monkeypatch.setattr(constants, name, value)
            monkeypatch.setenv(f"HF_{name.removeprefix('HF_')}", value)
        files = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + files)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        HfFileSystem.clear_instance_cache()
        yield server


@pytest.fixture
def url_of(request: pytest.FixtureRequest, tmp_path: Path) -> UrlOf:
    """`url_of(kind)` is a store of that kind, empty: local, memory, s3 or gs."""

    def url(kind: str) -> str:
        if kind == "local":
            return str(tmp_path / "store")
        if kind != "memory":
            _server(request, kind)
        return f"{kind}://{BUCKET}/{uuid4()}"

    return url


@pytest.fixture
def refusing_url(gcs: GcsServer, url_of: UrlOf, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place in Google Cloud Storage that answers 503, of whose words gcsfs makes a ValueError."""

    def refuse(*_: object) -> None:
        raise Refused(503, "the request is invalid at this time")

    for method in ("get", "list"):
        monkeypatch.setattr(gcs.objects, method, refuse)
    return url_of("gs")


@pytest.fixture
def requests_to(request: pytest.FixtureRequest) -> RequestsTo:
    """`requests_to(kind)`: (method, path) of each request to the server, which grows."""
    return lambda kind: _server(request, kind).requests


def _server(request: pytest.FixtureRequest, kind: str) -> GcsServer | S3Server:
    found: GcsServer | S3Server = request.getfixturevalue({"s3": "s3", "gs": "gcs"}[kind])
    return found
