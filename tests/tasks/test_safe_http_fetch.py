"""Fetching hostile URLs: only public addresses, and never more than the limits allow."""

import asyncio
import base64
import gzip
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext, suppress
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest
from loopback_server import LoopbackServer
from multidict import MultiMapping
from PIL import Image

from configs.settings.download import Download
from tasks.download.body_memory import BodyMemory, Room
from tasks.download.decoding_bomb_checks import check_picture
from tasks.download.decoding_memory import PixelBudget
from tasks.download.event_loop import run, shared
from tasks.download.fetch_with_robots_and_retries import Fetched, Fetcher
from tasks.download.pace_requests_per_web_host import AsyncClock
from tasks.download.retryable_and_final_failures import FetchFailed
from tasks.download.rotate_and_reduce import rotate_and_reduce
from tasks.download.row_fields_and_hash import Row
from tasks.download.safe_http_fetch import Deadline, FetchLimits, SafeHttpClient, is_public
from tasks.download.skip_dead_web_hosts import DeadHosts, is_outage
from tasks.download.source_protocol import ServedAt

pytestmark = pytest.mark.usefixtures("own_cache")

Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """A server on loopback that calls `answer` for every GET; yields its host:port."""

    with LoopbackServer(answering(answer)) as server:
        yield server.host


def answering(answer: Answer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(OSError):  # of a client that closes early, as it should
                answer(self)

    return Handler


def reply(
    handler: BaseHTTPRequestHandler, status: int = 200, body: bytes = b"", **headers: str
) -> None:
    handler.send_response(status)
    for name, value in ({"Content_Length": str(len(body))} | headers).items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def fetch(url: str, limits: FetchLimits, deadline: float) -> tuple[bytes, MultiMapping[str]]:
    async def fetched() -> tuple[bytes, MultiMapping[str]]:
        async with SafeHttpClient(limits, {}) as client:
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
    limits = FetchLimits(max_bytes=1000, timeout=timeout, allow_hosts=frozenset({host}))
    return fetch(f"http://{host}{path}", limits, time.monotonic() + deadline)


def png(side: int = 8, shade: int = 0) -> bytes:
    buffer = BytesIO()
    Image.new("RGB", (side, side), (shade, 60, 90)).save(buffer, "PNG")
    return buffer.getvalue()


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
        limits = FetchLimits(max_bytes=1000, timeout=60.0, allow_hosts=frozenset({host}))

        async def fetched() -> None:
            async with SafeHttpClient(limits, {}) as client:
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
        fetch(url, FetchLimits(1000, 60.0), time.monotonic() + 60)
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
            fetch(url, FetchLimits(1000, 60.0), time.monotonic() + 60)
    assert requested == ["pictures.example.org"]  # once


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "deflate"])
def test_a_packed_body_is_unpacked_within_the_limit(coding: str) -> None:
    content = b"a" * 5000
    packed = zlib.compress(content) if coding == "deflate" else gzip.compress(content)

    def fetched(max_bytes: int) -> bytes:
        limits = FetchLimits(max_bytes, 60.0, frozenset((host,)))
        return fetch(f"http://{host}/", limits, time.monotonic() + 60)[0]

    with serving(lambda h: reply(h, body=packed, Content_Encoding=coding)) as host:
        assert fetched(5000) == content
        with pytest.raises(FetchFailed, match="too large"):
            fetched(4999)


def test_a_slow_name_server_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released.wait(10) and [])
    with pytest.raises(FetchFailed, match="timeout"):
        fetch("http://pictures.example.org/", FetchLimits(1000, 60.0), time.monotonic() + 0.2)
    released.set()


def test_only_listed_ports_of_public_hosts_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", port))]

    def connect(self: socket.socket, address: Any) -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket.socket, "connect", connect)
    limits = FetchLimits(1000, 60.0, frozenset({"mine.org"}), frozenset({80, 8080}))
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
        limits = FetchLimits(1000, 2.0, frozenset({"127.0.0.1"}))
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
        fetch(url, FetchLimits(9, 60.0, frozenset({"127.0.0.1"})), time.monotonic() + 60)
    assert (failed.value.reason, failed.value.transient) == ("bad certificate", False)


def test_https_has_the_same_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ssl

    from tasks.download import safe_http_fetch

    certificate = _self_signed(tmp_path)
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(certificate)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    safe_http_fetch._tls.cache_clear()  # the trusted authorities are read once

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if handler.path == "/slow":
            trickle(handler, b"HTTP/1.1 200 OK\r\n\r\n")
        reply(handler, body=b"over TLS")

    server = LoopbackServer(answering(answer))
    server.socket = server_side.wrap_socket(server.socket, server_side=True)
    limits = FetchLimits(1000, 60.0, frozenset({server.host}))
    try:
        with server:
            body, _ = fetch(f"https://{server.host}/", limits, time.monotonic() + 60)
            assert body == b"over TLS"
            with pytest.raises(FetchFailed, match="timeout"):
                fetch(f"https://{server.host}/slow", limits, time.monotonic() + 0.3)
    finally:
        safe_http_fetch._tls.cache_clear()


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


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"<html>gone</html>", "not an image"),
        (b"", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "not an image"),
        (png(101), "too many pixels"),
    ],
)
def test_only_known_formats_within_the_pixel_limit_are_decoded(body: bytes, reason: str) -> None:
    with pytest.raises(FetchFailed, match=reason):
        check_picture(body, max_pixels=100 * 100)
    check_picture(png(100), max_pixels=100 * 100)


def _with_exif(exif: bytes, mode: str = "RGB", kind: str = "JPEG") -> bytes:
    buffer = BytesIO()
    Image.new(mode, (8, 6), 90).save(buffer, kind, exif=exif)
    return buffer.getvalue()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_only_pictures_with_an_orientation_are_rotated(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    for mode, kind in (("RGB", "JPEG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("RGBA", "PNG")):
        body = _with_exif(exif.tobytes(), mode, kind)
        turned = rotate_and_reduce(body)
        assert (turned.body == body) == (orientation == 1)
        with Image.open(BytesIO(turned.body)) as image:
            assert image.size == ((8, 6) if orientation < 5 else (6, 8))
            assert image.getexif().get(0x0112, 1) == 1
            assert image.size == turned[1:]


@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b""])
def test_a_picture_with_damaged_or_no_exif_is_unchanged(exif: bytes) -> None:
    body = _with_exif(exif)
    assert rotate_and_reduce(body) == (body, 8, 6)


def test_a_pixel_bomb_is_refused_by_its_header() -> None:
    bomb = bytearray(png(8))
    bomb[16:24] = (60000).to_bytes(4, "big") * 2
    with pytest.raises(FetchFailed, match=r"too many pixels|not an image"):
        check_picture(bytes(bomb), max_pixels=178_956_970)


def test_a_jpeg_of_many_scans_is_refused_and_a_progressive_one_is_not() -> None:
    buffer = BytesIO()
    Image.new("RGB", (64, 64)).save(buffer, "JPEG", progressive=True)
    progressive = buffer.getvalue()
    assert check_picture(progressive, max_pixels=10_000).pixels == 64 * 64
    last_scan = progressive[progressive.rindex(b"\xff\xda") : -2]
    bomb = progressive[:-2] + 100 * last_scan + progressive[-2:]
    with pytest.raises(FetchFailed, match="too many scans"):
        check_picture(bomb, max_pixels=10_000)


def test_all_threads_together_decode_no_more_pixels_than_the_limit() -> None:
    budget, most, pixels = PixelBudget(), [0], [30, 100, 70, 40, 60, 10, 100, 50]

    def decode(size: int) -> None:
        with budget.reserve(size, 100):
            most.append(budget.pixels)
            time.sleep(0.01)

    with ThreadPool(len(pixels)) as pool:
        pool.map(decode, pixels)
    assert 0 < max(most) <= 100
    assert budget.pixels == 0


def get_row(fetcher: Fetcher, row: Row) -> Fetched:
    async def fetched() -> Fetched:
        async with fetcher:
            with Room(BodyMemory(10**6)) as room:
                return await fetcher.get(row, room)

    return run(fetched())


def _fetcher(host: str, clock: AsyncClock | None = None, **settings: Any) -> Fetcher:
    chosen = {"backoff": 0.01, "timeout": 60.0, "retries": 2, **settings}
    return Fetcher(Download(**chosen), ServedAt(f"http://{host}/base", (host,)), clock)


def test_a_row_that_waits_for_a_retry_reserves_no_memory() -> None:
    """Otherwise rows that failed keep the memory that the others wait for."""
    memory, used = BodyMemory(1000), list[int]()

    async def sleep(_: float) -> None:
        used.append(memory.used)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        reply(handler, body=png(), Content_Length="900")

    async def fetched(fetcher: Fetcher) -> None:
        async with fetcher:
            with Room(memory) as room, pytest.raises(FetchFailed, match="connection broken"):
                await fetcher.get(Row("cut-off", ("",)), room)

    with serving(answer) as host:
        run(fetched(_fetcher(host, AsyncClock(sleep=sleep))))
    assert used == [0, 0]


def test_bodies_of_unknown_size_and_files_reserve_what_they_read(tmp_path: Path) -> None:
    """Of larger bodies than expected one is read at a time, so that they do not wait in a ring."""
    size, limit, largest = 50_000, 100_000, 60_000
    memory, most = BodyMemory(limit, unknown=20_000), [0]
    (tmp_path / "a").write_bytes(bytes(size))

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()  # the end of the connection ends the body
        handler.wfile.write(bytes(size))

    async def picture(fetcher: Fetcher, row: Row) -> None:
        with Room(memory) as room:
            body = (await fetcher.get(row, room)).body
            assert room.size >= len(body) == size
            most.append(memory.used)
            await asyncio.sleep(0)  # as a decoder
        assert room.size == 0

    async def pictures(fetcher: Fetcher) -> None:
        rows = [Row(str(n), ("",), file=str(tmp_path / "a") if n % 2 else None) for n in range(12)]
        async with fetcher, asyncio.timeout(60):
            await asyncio.gather(*(picture(fetcher, row) for row in rows))

    with serving(answer) as host:
        run(pictures(_fetcher(host, max_bytes=largest)))
    assert memory.used == 0 and max(most) <= limit + largest


def test_a_process_has_one_memory_of_bodies_for_all_recipes() -> None:
    assert shared(3).bodies is shared(4).bodies
    assert shared(3).decoders is shared(4).decoders
    assert shared(3).connections is not shared(4).connections


def test_transient_failures_are_retried_and_permanent_ones_are_not() -> None:
    tries: dict[str, int] = {}

    def answer(handler: BaseHTTPRequestHandler) -> None:
        tries[handler.path] = tries.get(handler.path, 0) + 1
        if handler.path == "/base/flaky" and tries[handler.path] == 3:
            reply(handler, body=png())
        else:
            reply(handler, 404 if handler.path == "/base/gone" else 500, Retry_After="0")

    with serving(answer) as host:
        fetcher = _fetcher(host)
        assert get_row(fetcher, Row("flaky", ("",)))[0] == png()
        for url, outcome in {"gone": ("http 404", False), "broken": ("http 500", True)}.items():
            with pytest.raises(FetchFailed) as failed:
                get_row(fetcher, Row(url, ("",)))
            assert (failed.value.reason, failed.value.transient) == outcome
    assert tries == {"/base/flaky": 3, "/base/gone": 1, "/base/broken": 3}


def test_retry_after_is_respected_within_the_deadline() -> None:
    slept: list[float] = []
    ahead = time.monotonic() + 1000.0  # ahead of the real clock, so no request times out

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    clock = AsyncClock(lambda: ahead + sum(slept), sleep)
    requested: list[str] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        requested.append(handler.path)
        reply(handler, 429, Retry_After="7" if len(requested) == 1 else "3600")

    with serving(answer) as host:
        fetcher = _fetcher(host, clock, deadline=20.0)
        with pytest.raises(FetchFailed, match="http 429"):
            get_row(fetcher, Row("a", ("",)))
    assert slept == [7.0]
    assert len(requested) == 2  # the second answer exceeds the deadline


def test_a_picture_that_changed_is_refused_by_its_sha256() -> None:
    with (
        serving(lambda h: reply(h, body=png())) as host,
        pytest.raises(FetchFailed, match="sha256 differs"),
    ):
        get_row(_fetcher(host), Row("a", ("",), "0" * 64))


def test_a_host_that_redirects_to_a_dead_one_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[str] = []
    with socket.socket() as bound:  # and does not listen: connections are refused
        bound.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{bound.getsockname()[1]}"

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
