"""Fetch an untrusted URL: public addresses only, with limits on bytes, time and redirects."""

from __future__ import annotations

import base64
import http.client
import ipaddress
import socket
import ssl
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from email.message import Message
from functools import cache
from io import BytesIO
from typing import Any

from tasks.download.failure_reasons import FetchFailed, as_fetch_failed

#: Special-purpose ranges (IANA registries) that `is_global` of some Python versions misses:
#: protocol assignments, 6to4 relays, documentation, and Azure's metadata service.
SPECIAL = tuple(
    ipaddress.ip_network(network)
    for network in ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20", "168.63.129.16/32")
)
#: All IPv6 addresses that are assigned for global unicast (RFC 4291).
GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
#: IPv6 prefixes that embed an IPv4 address (NAT64, 6to4) -> its first bit of the 128.
CARRIERS = {ipaddress.IPv6Network("64:ff9b::/96"): 96, ipaddress.IPv6Network("2002::/16"): 16}
#: Characters left unquoted in a path or query: all but spaces, controls and non-ASCII.
SAFE = "/%:?=&@!$'()*+,;[]~|{}^`"
CHUNK = 2**16


@dataclass(frozen=True)
class Limits:
    """Limits of one fetch, and the hosts and ports that it may reach."""

    max_bytes: int
    timeout: float  # seconds per name lookup, per connect and per read
    allow_hosts: frozenset[str] = frozenset()  # host or host:port: any address, any port
    allow_ports: frozenset[int] = frozenset((80, 443))  # of all other hosts


def fetch(
    url: str,
    headers: dict[str, str],
    limits: Limits,
    deadline: float,
    connects: Callable[[str], None] = lambda host: None,
) -> tuple[bytes, Message]:
    """Body and response headers of `url`.

    The check applies to the resolved socket address of the connection itself, so a second DNS
    resolution cannot substitute another. Redirects pass the same check. Proxies are ignored,
    because a proxy's target address cannot be checked.

    Args:
        deadline: `time.monotonic()` by which the whole body must be read.
        connects: called with host:port before each connection; it may raise FetchFailed.

    Raises:
        FetchFailed: address or port is not permitted, a limit is exceeded or the request fails.
    """
    with as_fetch_failed():
        request = _Request(url, headers, limits, deadline, connects)
        with _opener().open(request, timeout=limits.timeout) as response:
            return _read_body(response, limits.max_bytes), response.headers


def is_public(address: str) -> bool:
    """Whether an IP address is a global unicast address, also of an embedded IPv4 address."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        for network, start in CARRIERS.items():
            if ip in network:
                ip = ipaddress.IPv4Address((int(ip) >> (96 - start)) & 0xFFFFFFFF)
                break
    if isinstance(ip, ipaddress.IPv6Address) and ip not in GLOBAL_UNICAST:
        return False
    is_special = ip.is_multicast or ip.is_reserved or any(ip in network for network in SPECIAL)
    return ip.is_global and not is_special


def _remaining(timeout: float, deadline: float) -> float:
    """Seconds for the next operation: `timeout`, or less before the deadline."""
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise FetchFailed("timeout")
    return min(timeout, remaining)


class _Timed:
    """A socket whose reads respect both the timeout and the deadline of the fetch."""

    timeout_each = 0.0
    deadline = 0.0

    def recv_into(self, *args: Any, **options: Any) -> int:
        if self.deadline:
            self.settimeout(_remaining(self.timeout_each, self.deadline))  # type: ignore[attr-defined]
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
    """A request with its limits, its deadline and the function to call before it connects."""

    def __init__(
        self,
        url: str,
        headers: dict[str, str],
        limits: Limits,
        deadline: float,
        connects: Callable[[str], None],
    ) -> None:
        plain, basic = _split_credentials(url)
        super().__init__(plain, headers=headers)
        if basic is not None:  # unredirected: the target of a redirect must not receive it
            self.add_unredirected_header("Authorization", basic)
        self.limits, self.deadline, self.connects = limits, deadline, connects


class _Plain(http.client.HTTPConnection):
    def __init__(self, host: str, *, request: _Request, **options: Any) -> None:
        super().__init__(host, **options)
        self.limited_request = request

    def connect(self) -> None:
        self.sock = _connect(self.host, self.port, self.limited_request)


class _Tls(http.client.HTTPSConnection):
    def __init__(self, host: str, *, request: _Request, **options: Any) -> None:
        super().__init__(host, context=_tls(), **options)
        self.limited_request = request

    def connect(self) -> None:
        plain = _connect(self.host, self.port, self.limited_request)
        self.sock = _timed(
            _tls().wrap_socket(plain, server_hostname=self.host), self.limited_request
        )


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Plain, req, request=req)  # type: ignore[arg-type]


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Tls, req, request=req)  # type: ignore[arg-type]


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to http and https only, without reading their response bodies."""

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
        return _Request(newurl, dict(following.headers), req.limits, req.deadline, req.connects)


@cache
def _opener() -> urllib.request.OpenerDirector:
    """An opener for http and https, whose connections all use `_connect`."""
    director = urllib.request.OpenerDirector()
    for handler in (_Http(), _Https(context=_tls()), _Redirects(), urllib.request.UnknownHandler()):
        director.add_handler(handler)
    director.add_handler(urllib.request.HTTPErrorProcessor())
    director.add_handler(urllib.request.HTTPDefaultErrorHandler())
    return director


def _connect(host: str, port: int, request: _Request) -> socket.socket:
    """A connection to the first permitted address of `host` that accepts one."""
    limits, name = request.limits, f"{host.lower()}:{port}"
    request.connects(name)
    allowed = bool({host.lower(), name} & limits.allow_hosts)
    error: Exception = FetchFailed("unknown host")
    found = _resolve(host, port, _remaining(limits.timeout, request.deadline))
    for family, kind, protocol, _, address in found:
        if not allowed and not is_public(str(address[0])):
            error = FetchFailed("refused address")
            continue
        if not allowed and port not in limits.allow_ports:
            raise FetchFailed("refused port")
        attempt = _PlainSocket(family, kind, protocol)
        try:
            attempt.settimeout(_remaining(limits.timeout, request.deadline))
            attempt.connect(address)
            return _timed(attempt, request)
        except OSError as failure:
            attempt.close()
            error = failure
    raise error


def _resolve(host: str, port: int, timeout: float) -> list[Any]:
    """`socket.getaddrinfo`, which has no timeout of its own. Raises TimeoutError."""
    found: Future[list[Any]] = Future()

    def resolve() -> None:
        try:
            found.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=resolve, daemon=True).start()
    return found.result(timeout)


def _timed(connected: Any, request: _Request) -> Any:
    connected.timeout_each, connected.deadline = request.limits.timeout, request.deadline
    return connected


def _split_credentials(url: str) -> tuple[str, str | None]:
    """The quoted URL without user:password, and their Authorization header if there is one."""
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
        raise FetchFailed("connection broken")
    return bytes(body)
