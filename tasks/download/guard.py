"""Fetch a hostile URL: public addresses only, bounded in bytes, in time and in redirects."""

from __future__ import annotations

import base64
import http.client
import ipaddress
import socket
import ssl
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from email.message import Message
from functools import cache
from io import BytesIO
from typing import Any

from tasks.download.failures import FetchFailed, in_words

#: Addresses in public ranges that answer only to machines of the cloud they are in.
METADATA = {ipaddress.ip_address("168.63.129.16")}
#: Prefixes that carry an IPv4 address, and where in the 128 bits it begins: NAT64, 6to4.
CARRIERS = {ipaddress.IPv6Network("64:ff9b::/96"): 96, ipaddress.IPv6Network("2002::/16"): 16}
#: What may stand in a path or query as it is: everything but spaces, controls and non-ASCII.
SAFE = "/%:?=&@!$'()*+,;[]~|{}^`"
CHUNK = 2**16


@dataclass(frozen=True)
class Limits:
    """What one fetch may cost, and which hosts it may reach."""

    max_bytes: int
    timeout: float  # seconds to connect, and for each read
    allow_hosts: frozenset[str] = frozenset()  # host or host:port that may be private


def fetch(
    url: str, headers: dict[str, str], limits: Limits, deadline: float
) -> tuple[bytes, Message]:
    """Body and headers of `url`, read wholly before `deadline` (on time.monotonic's clock).

    The address is checked on the resolved socket address that is then connected to, so no second
    resolution can give another; every redirect goes the same way. No proxy is used: which address
    a proxy connects to could not be checked. Raises FetchFailed.
    """
    with in_words():
        request = _Request(url, headers, limits, deadline)
        with _opener().open(request, timeout=limits.timeout) as response:
            return _read_body(response, limits.max_bytes), response.headers


def is_public(address: str) -> bool:
    """Whether an IP address is one that anybody on the internet may be asked for."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        for network, start in CARRIERS.items():
            if ip in network:
                ip = ipaddress.IPv4Address((int(ip) >> (96 - start)) & 0xFFFFFFFF)
                break
    return ip.is_global and not ip.is_multicast and not ip.is_reserved and ip not in METADATA


def _left(timeout: float, deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise FetchFailed("timeout", transient=True)
    return min(timeout, left)


class _Timed:
    """A socket whose every read is bounded by the fetch's deadline as well as by its timeout."""

    timeout_each = 0.0
    deadline = 0.0

    def recv_into(self, *args: Any, **options: Any) -> int:
        if self.deadline:
            self.settimeout(_left(self.timeout_each, self.deadline))  # type: ignore[attr-defined]
        return super().recv_into(*args, **options)  # type: ignore[misc]


class _PlainSocket(_Timed, socket.socket):
    pass


class _TlsSocket(_Timed, ssl.SSLSocket):
    pass


@cache
def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.sslsocket_class = _TlsSocket
    return context


class _Request(urllib.request.Request):
    """A request that knows what it may cost."""

    def __init__(self, url: str, headers: dict[str, str], limits: Limits, deadline: float) -> None:
        plain, basic = _split_credentials(url)
        super().__init__(plain, headers=headers)
        if basic is not None:  # not sent on when redirected
            self.add_unredirected_header("Authorization", basic)
        self.limits, self.deadline = limits, deadline


class _Plain(http.client.HTTPConnection):
    def __init__(self, host: str, *, request: _Request, **options: Any) -> None:
        super().__init__(host, **options)
        self.asked = request

    def connect(self) -> None:
        self.sock = _connect(self.host, self.port, self.asked)


class _Tls(http.client.HTTPSConnection):
    def __init__(self, host: str, *, request: _Request, **options: Any) -> None:
        super().__init__(host, context=_tls(), **options)
        self.asked = request

    def connect(self) -> None:
        plain = _connect(self.host, self.port, self.asked)
        self.sock = _timed(_tls().wrap_socket(plain, server_hostname=self.host), self.asked)


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Plain, req, request=req)  # type: ignore[arg-type]


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Tls, req, request=req)  # type: ignore[arg-type]


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to http and https only, without reading the pages that announce them."""

    def http_error_302(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any
    ) -> Any:
        fp.close()
        return super().http_error_302(req, BytesIO(), code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        if following is None or not isinstance(req, _Request):
            return None
        return _Request(newurl, dict(following.headers), req.limits, req.deadline)


@cache
def _opener() -> urllib.request.OpenerDirector:
    """An opener that knows http and https, and connects in no way but ours."""
    director = urllib.request.OpenerDirector()
    for handler in (_Http(), _Https(context=_tls()), _Redirects(), urllib.request.UnknownHandler()):
        director.add_handler(handler)
    director.add_handler(urllib.request.HTTPErrorProcessor())
    director.add_handler(urllib.request.HTTPDefaultErrorHandler())
    return director


def _connect(host: str, port: int, request: _Request) -> socket.socket:
    """A connection to an address of `host` that may be reached."""
    limits = request.limits
    names = {host.lower(), f"{host.lower()}:{port}"}
    allowed = bool(names & limits.allow_hosts)
    error: Exception = FetchFailed("unknown host")
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, address in found:
        if not allowed and not is_public(str(address[0])):
            error = FetchFailed("refused address")
            continue
        attempt = _PlainSocket(family, kind, protocol)
        try:
            attempt.settimeout(_left(limits.timeout, request.deadline))
            attempt.connect(address)
            return _timed(attempt, request)
        except OSError as failure:
            attempt.close()
            error = failure
    raise error


def _timed(connected: Any, request: _Request) -> Any:
    connected.timeout_each, connected.deadline = request.limits.timeout, request.deadline
    return connected


def _split_credentials(url: str) -> tuple[str, str | None]:
    """The URL without user:password and fit for a request line, and the Authorization for them."""
    parts = urllib.parse.urlsplit(url.strip())
    if parts.scheme not in ("http", "https"):
        raise FetchFailed("refused scheme")
    if not parts.hostname:
        raise FetchFailed("bad url")
    userinfo, at, address = parts.netloc.rpartition("@")
    if not address.isascii():
        address = address.encode("idna").decode()
    path, query = (urllib.parse.quote(part, safe=SAFE) for part in (parts.path, parts.query))
    plain = urllib.parse.urlunsplit((parts.scheme, address, path, query, ""))
    if not at:
        return plain, None
    secret = urllib.parse.unquote_to_bytes(userinfo)
    return plain, "Basic " + base64.b64encode(secret).decode()


def _read_body(response: Any, max_bytes: int) -> bytes:
    length = response.headers.get("Content-Length", "")
    declared = int(length) if length.isascii() and length.isdigit() else None
    if declared is not None and declared > max_bytes:
        raise FetchFailed("too large")
    body = bytearray()
    while chunk := response.read1(min(CHUNK, max_bytes + 1 - len(body))):
        body += chunk
        if len(body) > max_bytes:
            raise FetchFailed("too large")
    if declared is not None and len(body) < declared:
        raise FetchFailed("connection broken", transient=True)
    return bytes(body)
