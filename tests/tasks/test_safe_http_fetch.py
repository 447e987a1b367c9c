"""Fetching hostile URLs: only public addresses, and never more than the limits allow."""

import base64
import errno
import gzip
import socket
import threading
import time
import zlib
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loopback_server import LoopbackServer
from multidict import MultiMapping
from web_sites import answering, reply, serving

from configs.settings.data import Download
from tasks.download.fetch_with_retries import run
from tasks.download.http import Deadline, FetchFailed, SafeHttpClient, is_public

pytestmark = pytest.mark.usefixtures("own_cache")


def limits_of(max_bytes: int = 1000, timeout: float = 60.0, **settings: Any) -> Download:
    return Download(max_bytes=max_bytes, timeout=timeout, **settings)


def fetch(url: str, limits: Download, deadline: float) -> tuple[bytes, MultiMapping[str]]:
    async def fetched() -> tuple[bytes, MultiMapping[str]]:
        async with SafeHttpClient(limits, (), {}) as client:
            return await fetch_at_once(client, url, deadline)

    return run(fetched())


async def fetch_at_once(
    client: SafeHttpClient, url: str, deadline: float
) -> tuple[bytes, MultiMapping[str]]:
    def admit(*_: object) -> AbstractAsyncContextManager[bool]:
        return nullcontext(False)

    return await client.fetch(url, Deadline(deadline), room=None, admit=admit, truncate=None)


def get(
    host: str, path: str = "/", *, deadline: float = 60.0, timeout: float = 60.0
) -> tuple[bytes, MultiMapping[str]]:
    limits = limits_of(timeout=timeout, allow_hosts=(host,))
    return fetch(f"http://{host}{path}", limits, time.monotonic() + deadline)


def test_a_connection_that_was_asked_to_close_is_not_used_again() -> None:
    """Also where the server does not repeat the header: the next request would find it closed."""
    connections = set()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        assert handler.headers["Connection"] == "close"
        handler.protocol_version = "HTTP/1.1"
        handler.close_connection = False  # the client must close it
        connections.add(handler.client_address)
        reply(handler, body=b"one")

    with serving(answer) as host:
        limits = limits_of(allow_hosts=(host,))

        async def fetched() -> None:
            async with SafeHttpClient(limits, (), {}) as client:
                for _ in range(3):
                    await fetch_at_once(client, f"http://{host}/", time.monotonic() + 60)

        run(fetched())
    assert len(connections) == 3


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "100.100.100.200", "0.0.0.0", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1",
        "168.63.129.16", "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254",
        "::ffff:10.0.0.1", "::ffff:169.254.169.254", "64:ff9b::a00:1", "2002:7f00:1::1", "ff02::1",
        "192.0.0.192", "192.88.99.1", "fec0::1", "::a00:1", "64:ff9b:1::a00:1", "4000::1",
        "2001::1", "2001:db8::1", "3fff::1",
    ],
)  # fmt: skip
def test_private_and_special_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_global_unicast_addresses_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file:///etc/passwd", "refused scheme"),
        ("ftp://example.org/a.png", "refused scheme"),
        ("images/a.png", "refused scheme"),
        ("http://127.0.0.1/", "refused address"),
        ("http://localhost:8080/", "refused address"),
        ("http://2130706433/", "refused address"),
        ("http://0x7f.1/", "refused address"),
        ("http://[::1]/", "refused address"),
        ("http://[::ffff:127.0.0.1]/", "refused address"),
        ("http://8.8.8.8@127.0.0.1/", "refused address"),
        ("https://169.254.169.254/latest/meta-data", "refused address"),
        ("http:///a.png", "bad url"),
        ("http://[oops/a.png", "bad url"),
        ("http://127.0.0.1:port/", "bad url"),
        (f"http://127.0.0.1/{'a' * 2**13}", "bad url"),
    ],
)
def test_a_url_that_is_not_public_http_is_refused(url: str, reason: str) -> None:
    with pytest.raises(FetchFailed) as failed:
        fetch(url, limits_of(), time.monotonic() + 60)
    assert (failed.value.reason, failed.value.transient) == (reason, False)


def test_a_host_name_is_checked_by_its_resolved_address(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = []

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        requested.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    with serving(lambda h: reply(h, body=b"secret")) as host:
        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        url = f"http://pictures.example.org:{host.partition(':')[2]}/"
        with pytest.raises(FetchFailed, match="refused address"):
            fetch(url, limits_of(), time.monotonic() + 60)
    assert requested == ["pictures.example.org"]  # once


PUBLIC = ("8.8.8.8", "2606:4700::1111", "1.1.1.1", "2001:4860:4860::8888")
PRIVATE = ("127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "fd00:ec2::254", "::ffff:127.0.0.1")


def failure_of(
    monkeypatch: pytest.MonkeyPatch, failures: dict[str, OSError], limits: Download
) -> tuple[Exception, set[str]]:
    """What a fetch raises of a name whose addresses cannot be connected to, and those it tried."""
    tried = set()

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        families = [socket.AF_INET6 if ":" in a else socket.AF_INET for a in failures]
        pairs = zip(families, failures, strict=True)
        return [(family, socket.SOCK_STREAM, 6, "", (a, port)) for family, a in pairs]

    def connect(self: socket.socket, address: Any) -> None:
        tried.add(address[0])
        raise failures[address[0]]

    with monkeypatch.context() as patch, pytest.raises((FetchFailed, OSError)) as failed:
        patch.setattr(socket, "getaddrinfo", resolve)
        patch.setattr(socket.socket, "connect", connect)
        fetch("http://pictures.example.org/", limits, time.monotonic() + 60)
    return failed.value, tried


def test_a_second_address_is_checked_when_the_first_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requested = []

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*kind, ("8.8.8.8", port)), (*kind, ("127.0.0.1", port))]

    connect = socket.socket.connect

    def connect_but_there(self: socket.socket, address: Any) -> None:
        if address[0] == "8.8.8.8":
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
        connect(self, address)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        requested.append(handler.path)
        reply(handler, body=b"secret")

    with serving(answer) as host:
        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        monkeypatch.setattr(socket.socket, "connect", connect_but_there)
        port = int(host.partition(":")[2])
        limits = limits_of(allow_ports=(port,))
        with pytest.raises(FetchFailed) as failed:
            fetch(f"http://pictures.example.org:{port}/", limits, time.monotonic() + 60)
    assert (failed.value.reason, failed.value.transient) == ("refused address", False)
    assert not requested


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.sampled_from(PUBLIC + PRIVATE), min_size=1, max_size=6, unique=True))
def test_whatever_the_order_of_a_names_addresses_no_private_one_is_connected_to(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str]
) -> None:
    refused = {a: ConnectionRefusedError(errno.ECONNREFUSED, f"refused by {a}") for a in addresses}
    error, tried = failure_of(monkeypatch, dict(refused), limits_of())
    assert tried == set(addresses) & set(PUBLIC)
    is_refused = bool(set(addresses) & set(PRIVATE))
    assert str(error) == ("refused address" if is_refused else "connection refused")


OF_THE_MACHINE = (
    *(errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.ENOSPC),
)


@pytest.mark.parametrize("number", OF_THE_MACHINE, ids=errno.errorcode.get)
def test_what_this_machine_lacks_is_no_failure_of_a_host(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where another address of the host fails in another way."""
    away = OSError(errno.ENETUNREACH, "no IPv6")
    limits = limits_of()
    for failures in (
        {"8.8.8.8": OSError(number, "a")},
        {"2606:4700::1111": away, "8.8.8.8": OSError(number, "a")},
        {"8.8.8.8": OSError(number, "a"), "1.1.1.1": ConnectionRefusedError("b")},
    ):
        error, _ = failure_of(monkeypatch, failures, limits)
        assert isinstance(error, OSError)
        assert error.errno == number


@pytest.mark.parametrize("number", [errno.ENETUNREACH, errno.EADDRNOTAVAIL])
def test_a_machine_without_ipv6_lacks_nothing_for_other_hosts(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = {"2606:4700::1111": OSError(number, "no IPv6")}
    error, _ = failure_of(monkeypatch, failures, limits_of())
    assert isinstance(error, FetchFailed)
    assert (error.reason, error.transient) == ("connection broken", True)


@pytest.mark.parametrize("is_short", [True, False])
def test_a_name_that_is_not_looked_up_for_want_of_descriptors_is_not_unknown(
    is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The C library calls every host unknown then."""

    def look_up(*_: object, **__: object) -> None:
        if is_short:
            monkeypatch.setattr(socket, "socket", refuse)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises((FetchFailed, OSError)) as failed:
        fetch("http://pictures.example.org/", limits_of(), time.monotonic() + 60)
    assert getattr(failed.value, "errno", None) == (errno.EMFILE if is_short else None)
    assert isinstance(failed.value, OSError) == is_short


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "deflate"])
def test_a_packed_body_is_unpacked_within_the_limit(coding: str) -> None:
    content = b"a" * 5000
    packed = zlib.compress(content) if coding == "deflate" else gzip.compress(content)

    def fetched(max_bytes: int) -> bytes:
        limits = limits_of(max_bytes, allow_hosts=(host,))
        return fetch(f"http://{host}/", limits, time.monotonic() + 60)[0]

    with serving(lambda h: reply(h, body=packed, Content_Encoding=coding)) as host:
        assert fetched(5000) == content
        with pytest.raises(FetchFailed, match="too large"):
            fetched(4999)


def test_a_slow_name_server_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released.wait(10) and [])
    with pytest.raises(FetchFailed, match="timeout"):
        fetch("http://pictures.example.org/", limits_of(), time.monotonic() + 0.2)
    released.set()


def test_only_listed_ports_of_public_hosts_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", port))]

    def connect(self: socket.socket, address: Any) -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket.socket, "connect", connect)
    limits = limits_of(allow_hosts=("mine.org",), allow_ports=(80, 8080))
    reasons = {
        "http://other.org/": "connection refused",
        "http://other.org:8080/": "connection refused",
        "http://other.org:25/": "refused port",
        "https://other.org/": "refused port",
        "http://mine.org:25/": "connection refused",
    }
    for url, reason in reasons.items():
        with pytest.raises(FetchFailed, match=reason):
            fetch(url, limits, time.monotonic() + 60)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("http://169.254.169.254/latest", "refused address"),
        ("http://localhost:1/", "refused address"),
        ("file:///etc/passwd", "refused scheme"),
        ("ftp://example.org/", "refused scheme"),
        ("/again", "bad redirect"),
    ],
)
def test_a_redirect_is_checked_like_any_url(target: str, reason: str) -> None:
    with (
        serving(lambda h: reply(h, 302, Location=target)) as host,
        pytest.raises(FetchFailed) as failed,
    ):
        get(host)
    assert (failed.value.reason, failed.value.transient) == (reason, False)


def test_a_good_redirect_is_followed_without_the_credentials() -> None:
    seen: list[str | None] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        seen.append(handler.headers.get("Authorization"))
        if handler.path == "/a%20b":
            reply(handler, 301, Location="/there")
        else:
            reply(handler, body=b"here")

    with serving(answer) as host:
        limits = limits_of(timeout=2.0, allow_hosts=("127.0.0.1",))
        body, _ = fetch(f"http://us:pa%73s@{host}/a b", limits, time.monotonic() + 60)
    assert body == b"here"
    assert seen == ["Basic " + base64.b64encode(b"us:pass").decode(), None]


def test_a_body_is_bounded_whatever_its_content_length() -> None:
    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302 if handler.path == "/redirect" else 200)
        handler.send_header("Location", "http://127.0.0.1/")
        handler.end_headers()
        while True:
            handler.wfile.write(b"x" * 4096)

    with serving(endless) as host:
        with pytest.raises(FetchFailed, match="too large"):
            get(host)
        with pytest.raises(FetchFailed, match="refused address"):
            get(host, "/redirect")
    with (
        serving(lambda h: reply(h, Content_Length="5000")) as host,
        pytest.raises(FetchFailed, match="too large"),
    ):
        get(host)
    with (
        serving(lambda h: reply(h, body=b"half", Content_Length="8")) as host,
        pytest.raises(FetchFailed, match="connection broken") as failed,
    ):
        get(host)
    assert failed.value.transient


def trickle(handler: BaseHTTPRequestHandler, start: bytes) -> None:
    """Send a byte every 50 ms for a minute."""
    handler.wfile.write(start)
    for _ in range(1200):
        handler.wfile.write(b"x")
        time.sleep(0.05)


@pytest.mark.parametrize("start", [b"\r\n\r\n", b"\r\nX-Long: "], ids=["body", "header"])
def test_a_slow_body_or_header_ends_at_the_deadline(start: bytes) -> None:
    with (
        serving(lambda h: trickle(h, b"HTTP/1.1 200 OK" + start)) as host,
        pytest.raises(FetchFailed, match="timeout") as failed,
    ):
        get(host, deadline=0.3)
    assert failed.value.transient


def test_a_server_without_an_answer_ends_at_the_timeout() -> None:
    released = threading.Event()
    with serving(lambda h: released.wait(60) and None) as host:
        with pytest.raises(FetchFailed, match="timeout"):
            get(host, timeout=0.2, deadline=1000.0)
        released.set()


@pytest.mark.parametrize(
    ("status", "transient"), [(401, False), (404, False), (410, False), (429, True), (503, True)]
)
def test_the_status_decides_whether_a_failure_is_transient(status: int, transient: bool) -> None:
    with (
        serving(lambda h: reply(h, status, Retry_After="7")) as host,
        pytest.raises(FetchFailed) as failed,
    ):
        get(host)
    assert (failed.value.reason, failed.value.transient) == (f"http {status}", transient)
    assert failed.value.wait == 7.0


def test_a_self_signed_certificate_is_refused(tmp_path: Path) -> None:
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(_self_signed(tmp_path))
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with suppress(OSError):
            context.wrap_socket(listener.accept()[0], server_side=True)

    threading.Thread(target=accept, daemon=True).start()
    with listener, pytest.raises(FetchFailed) as failed:
        url = f"https://127.0.0.1:{listener.getsockname()[1]}/"
        fetch(url, limits_of(9, allow_hosts=("127.0.0.1",)), time.monotonic() + 60)
    assert (failed.value.reason, failed.value.transient) == ("bad certificate", False)


def test_https_has_the_same_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ssl

    from tasks.download import http

    certificate = _self_signed(tmp_path)
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(certificate)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    http._tls.cache_clear()  # the trusted authorities are read once

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if handler.path == "/slow":
            trickle(handler, b"HTTP/1.1 200 OK\r\n\r\n")
        reply(handler, body=b"over TLS")

    server = LoopbackServer(answering(answer))
    server.socket = server_side.wrap_socket(server.socket, server_side=True)
    limits = limits_of(allow_hosts=(server.host,))
    try:
        with server:
            body, _ = fetch(f"https://{server.host}/", limits, time.monotonic() + 60)
            assert body == b"over TLS"
            with pytest.raises(FetchFailed, match="timeout"):
                fetch(f"https://{server.host}/slow", limits, time.monotonic() + 0.3)
    finally:
        http._tls.cache_clear()


def _self_signed(folder: Path) -> Path:
    """A PEM with a key and a self-signed certificate for 127.0.0.1."""
    import datetime
    import ipaddress

    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "loopback")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1)
        .not_valid_before(now - datetime.timedelta(1))
        .not_valid_after(now + datetime.timedelta(1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = folder / "loopback.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return path
