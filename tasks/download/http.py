"""HTTP with untrusted hosts: public addresses only, bounded bodies, and reasons of failures.

A failure has one of a small set of reasons, without addresses, ports or secrets. A fetch has limits
on bytes, time and redirects. The fetched bodies of a process that wait for decoding have bounded
memory.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import ipaddress
import os
import re
import socket
import ssl
import threading
import time
import urllib.parse
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import cache, partial
from typing import Any, NamedTuple

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from multidict import MultiMapping
from yarl import URL

from artifacts.errors import is_full, shortage
from configs.settings.data import Download

#: Reasons of rows that are not requested: their host is dead, or asks for a long wait.
NO_ANSWER = "host does not answer"
BUSY = "host asks to wait"
#: The host's crawl delay keeps the row for too long: no outage, its other rows are fetched.
CRAWL_DELAY = "crawl delay too long"
#: Its robots.txt excludes the URL, or cannot be read for now (RFC 9309).
DISALLOWED = "robots.txt disallows"
NO_ROBOTS = "robots.txt unavailable"
#: The body has an encoding other than gzip and deflate, or is damaged.
BAD_ENCODING = "bad content encoding"
NOT_REQUESTED = {NO_ANSWER, BUSY, CRAWL_DELAY, DISALLOWED, NO_ROBOTS}
#: Reasons that may pass: network trouble, overload (RFC 9110, RFC 6585, RFC 8470), server errors.
TRANSIENT = re.compile(
    "timeout|name not resolved|connection refused|connection broken|http (408|425|429|[5-9]..)|"
    + "|".join(map(re.escape, (NO_ANSWER, BUSY, CRAWL_DELAY, NO_ROBOTS)))
)


class FetchFailed(Exception):
    """A fetch failed. `reason` is one of a small set of strings and names no host."""

    def __init__(self, reason: str, wait: float = 0.0, attempts: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait = wait  # seconds to wait before a retry, as the server requests
        self.attempts = attempts  # requests of the row so far

    @property
    def transient(self) -> bool:
        """Whether a retry may succeed."""
        return is_transient(self.reason)


#: Before the reason why a row's mask could not be fetched or used.
OF_MASK = "mask: "
OF_CONTROL = "control picture: "


def is_transient(reason: str) -> bool:
    """Whether a row that failed for `reason` may succeed later."""
    return TRANSIENT.fullmatch(reason.removeprefix(OF_MASK).removeprefix(OF_CONTROL)) is not None


class RefusedAddress(OSError):
    """An address or a port is not permitted; its text is the reason."""


@contextmanager
def as_fetch_failed() -> Iterator[None]:
    """Convert the exceptions of a fetch to FetchFailed, a new one: requests may share errors.

    Raises OSError for what this machine lacks: another row would fail alike.
    """
    try:
        yield
    except FetchFailed as failure:
        raise FetchFailed(failure.reason, failure.wait, failure.attempts) from None
    except aiohttp.ClientConnectorCertificateError as error:
        raise FetchFailed(_reason(error.certificate_error)) from None
    except OSError as error:
        cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
        if is_of_machine(cause):
            raise cause from None
        raise FetchFailed(_reason(cause)) from None
    except ValueError:  # also aiohttp's errors of URLs
        raise FetchFailed("bad url") from None
    except aiohttp.ClientError:
        # An early close is indistinguishable from a server that does not speak HTTP.
        raise FetchFailed("connection broken") from None


def is_of_machine(error: OSError) -> bool:
    """Whether this machine lacks what a fetch needs: descriptors, ports, memory or disk."""
    return shortage(error) is not None or is_full(error)


def _reason(error: Exception) -> str:
    if isinstance(error, RefusedAddress):
        return str(error)
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, socket.gaierror):
        return "name not resolved" if error.errno == socket.EAI_AGAIN else "unknown host"
    if isinstance(error, ssl.SSLCertVerificationError):
        return "bad certificate"
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return "tls failed"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return "connection broken"


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds of a Retry-After header (RFC 9110: a number or a date); 0 if absent or invalid."""
    value = (headers.get("Retry-After") or "").strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return 0.0


#: Bytes that a body of unknown size reserves.
UNKNOWN = 2**22


class BodyMemory:
    """Bytes of the bodies that are read or wait for decoding; for one event loop."""

    def __init__(self, limit: int, unknown: int = UNKNOWN) -> None:
        self.limit = limit  # bytes; one larger body is read alone
        self.unknown = unknown  # bytes that a body of unknown size reserves
        self.used = 0
        self.growth = asyncio.Lock()  # of one body at a time, which may exceed the limit
        self._turn = asyncio.Lock()  # one after another: small bodies do not overtake
        self._freed = asyncio.Event()

    async def reserve(self, size: int) -> None:
        """Wait until `size` bytes are free."""
        async with self._turn:
            while self.used and self.used + size > self.limit:
                self._freed.clear()
                await self._freed.wait()
            self.used += size

    def free(self, size: int) -> None:
        """Free `size` bytes."""
        self.used -= size
        self._freed.set()


class Room:
    """Memory for one row's body; the context ends when the body is decoded."""

    def __init__(self, memory: BodyMemory) -> None:
        self.memory = memory
        self.size = 0
        self.is_grown = False

    async def reserve(self, size: int | None) -> None:
        """Reserve a body's bytes instead of those of an earlier attempt."""
        self.free()
        size = self.memory.unknown if size is None else size
        await self.memory.reserve(size)
        self.size = size

    async def grow(self, size: int) -> None:
        """Reserve `size` bytes in all for a body that is being read.

        It does not wait for free memory: bodies that do so with a part of theirs wait in a ring.
        """
        await self.memory.growth.acquire()
        self.is_grown = True
        self.memory.used += size - self.size
        self.size = size

    def free(self) -> None:
        """Free the bytes."""
        self.memory.free(self.size)
        self.size = 0
        if self.is_grown:
            self.memory.growth.release()
            self.is_grown = False

    def __enter__(self) -> Room:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()


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
MAX_REDIRECTS = 10
REDIRECTS = (301, 302, 303, 307, 308)
MAX_HEADER = 2**16  # bytes of a header line
MAX_URL = 2**13  # characters; web servers refuse longer ones
#: `Content-Encoding` of bodies that zlib unpacks. Some stores ignore `Accept-Encoding: identity`.
PACKED = ("gzip", "x-gzip", "deflate")
ZLIB_OR_GZIP = 47  # zlib's window bits that recognize both headers
#: Seconds for which a connection waits for another request of its host; Apache closes it after 5.
KEEP_ALIVE = 4.0


class Target(NamedTuple):
    """A checked URL."""

    url: str  # quoted, without user:password
    scheme: str
    host: str
    port: int
    authorization: str | None

    @property
    def name(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


@dataclass
class Deadline:
    """Monotonic time by which a body must be read; waits for a turn move it."""

    at: float


@dataclass
class Connecting:
    """A connection's attempts, one for each address of a name."""

    is_allowed: bool  # to have any address and port
    #: Refusals, and errors of this machine, which other errors must not hide.
    errors: list[OSError] = field(default_factory=list)


_connecting: ContextVar[Connecting] = ContextVar("connecting")


#: Function that admits a request: the context waits for the request's turn and extends the
#: deadline by the wait. It yields whether the connection will be used again, or raises FetchFailed.
Admit = Callable[[Target, Deadline], AbstractAsyncContextManager[bool]]


#: The context of all clients: to read the certificates takes milliseconds.
_tls = cache(ssl.create_default_context)


class SafeHttpClient:
    """A client of one event loop; use it as an asynchronous context manager.

    Args:
        own_hosts: host or host:port of this stage's servers, allowed beside those of the settings.
        headers: of each request.
    """

    def __init__(
        self, settings: Download, own_hosts: Collection[str], headers: dict[str, str]
    ) -> None:
        self.settings = settings
        self.allow_hosts = {host.lower() for host in (*settings.allow_hosts, *own_hosts)}
        self.headers = {"Accept-Encoding": "identity", **headers}

    async def __aenter__(self) -> SafeHttpClient:
        timeout = self.settings.timeout
        connector = aiohttp.TCPConnector(
            resolver=_Resolver(timeout),
            socket_factory=self._permitted_socket,
            ssl=_tls(),
            limit=0,  # callers limit the connections
            keepalive_timeout=KEEP_ALIVE,
        )
        self.session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(sock_connect=timeout, sock_read=timeout),
            auto_decompress=False,
            request_class=_Request,
            max_line_size=MAX_HEADER,
            max_field_size=MAX_HEADER,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def fetch(
        self, url: str, deadline: Deadline, *, room: Room | None, admit: Admit, truncate: int | None
    ) -> tuple[bytes, MultiMapping[str]]:
        """Body and response headers of `url`.

        The check applies to the socket address of the connection itself, so a second DNS
        resolution cannot substitute another. Redirects pass the same check. Proxies are ignored,
        because a proxy's target address cannot be checked.

        Args:
            room: memory for the body; it is reserved before the body is read.
            admit: admits each request, those after redirects too.
            truncate: bytes of the body to read; a larger body is cut off instead of refused.

        Raises:
            FetchFailed: address or port is not permitted, a limit is exceeded or the request fails.
        """
        target = parse_url(url)
        for _ in range(MAX_REDIRECTS + 1):
            with as_fetch_failed():
                async with admit(target, deadline) as is_used_again:
                    answer = await self._request(target, deadline, room, is_used_again, truncate)
            if not isinstance(answer, Target):
                return answer
            target = answer
        raise FetchFailed("bad redirect")

    async def _request(
        self,
        target: Target,
        deadline: Deadline,
        room: Room | None,
        is_used_again: bool,
        truncate: int | None,
    ) -> tuple[bytes, MultiMapping[str]] | Target:
        """Body and headers, or the target of a redirect."""
        headers = self.headers if is_used_again else {**self.headers, "Connection": "close"}
        if target.authorization is not None:
            headers = {**headers, "Authorization": target.authorization}
        async with (
            asyncio.timeout_at(deadline.at) as limit,
            self._response(target, headers) as response,
        ):
            if response.status in REDIRECTS:
                return _redirected(target, response)
            if 300 <= response.status < 400:
                raise FetchFailed("bad redirect")
            if not 200 <= response.status < 300:
                raise FetchFailed(f"http {response.status}", retry_after(response.headers))
            size = response.content_length
            if truncate is None and size is not None and size > self.settings.max_bytes:
                raise FetchFailed("too large")

            async def waited(reserved: Awaitable[None]) -> None:
                limit.reschedule(None)  # a wait for memory is not the server's fault
                since = time.monotonic()
                await reserved
                deadline.at += time.monotonic() - since
                limit.reschedule(deadline.at)

            if room is not None:
                await waited(room.reserve(size))
            body = await self._read_body(response, truncate, room, waited)
            if (coding := response.headers.get("Content-Encoding", "").strip().lower()) in PACKED:
                most = self.settings.max_bytes
                if room is not None and not room.is_grown:
                    await waited(room.grow(most))
                body = await asyncio.to_thread(_unpacked, body, most, truncate)
            elif coding not in ("", "identity"):
                raise FetchFailed(BAD_ENCODING)
            return body, response.headers

    @asynccontextmanager
    async def _response(
        self, target: Target, headers: dict[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response of a request, before its body is read."""
        is_allowed = bool({target.host, target.name} & self.allow_hosts)
        connecting = Connecting(is_allowed)
        _connecting.set(connecting)
        url = URL(target.url, encoded=True)
        try:
            async with self.session.get(url, headers=headers, allow_redirects=False) as response:
                yield response
        except aiohttp.ClientConnectorError:
            # If several addresses fail in different ways, aiohttp reports none of the errors.
            if connecting.errors:
                raise connecting.errors[0] from None
            raise

    async def _read_body(
        self,
        response: aiohttp.ClientResponse,
        truncate: int | None,
        room: Room | None,
        waited: Callable[[Awaitable[None]], Awaitable[None]],
    ) -> bytes:
        body = bytearray()
        async for chunk in response.content.iter_any():
            if room is not None and room.size < len(body) + len(chunk) <= self.settings.max_bytes:
                await waited(room.grow(self.settings.max_bytes))
            body += chunk
            if truncate is not None and len(body) >= truncate:
                return bytes(body[:truncate])
            if len(body) > self.settings.max_bytes:
                raise FetchFailed("too large")
        return bytes(body)

    def _permitted_socket(self, info: Any) -> socket.socket:
        """The socket of a connection, if its address and port are permitted."""
        family, kind, protocol, _, address = info
        connecting = _connecting.get()
        try:
            if not connecting.is_allowed:
                if not is_public(str(address[0])):
                    raise RefusedAddress("refused address")
                if address[1] not in self.settings.allow_ports:
                    raise RefusedAddress("refused port")
            return _Socket(family, kind, protocol, connecting=connecting)
        except OSError as error:
            connecting.errors.append(error)
            raise


class _Socket(socket.socket):
    """A socket that notes an error of this machine."""

    def __init__(self, *arguments: int, connecting: Connecting) -> None:
        super().__init__(*arguments)
        self.connecting = connecting

    def connect(self, address: Any) -> None:
        """Connect. Raises OSError."""
        try:
            super().connect(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL and self.family == socket.AF_INET6:
                # A machine without IPv6 lacks no port, and has no way to the host.
                raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH)) from None
            if is_of_machine(error):
                self.connecting.errors.append(error)
            raise


class _Request(aiohttp.ClientRequest):
    """Closes the connection after a request with `Connection: close`.

    aiohttp uses it again unless the server repeats the header, which not every server does.
    """

    async def send(self, conn: Any) -> aiohttp.ClientResponse:
        response = await super().send(conn)
        if self.headers.get("Connection") == "close":
            conn.protocol.force_close()
        return response


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


def parse_url(url: str) -> Target:
    """A listed URL, quoted. Raises FetchFailed if it is not a valid http or https URL."""
    with as_fetch_failed():
        if len(url) > MAX_URL:  # hostile rules and URLs would keep the parser of robots.txt busy
            raise FetchFailed("bad url")
        parts = urllib.parse.urlsplit(url.strip())
        if parts.scheme not in ("http", "https"):
            raise FetchFailed("refused scheme")
        if not parts.hostname:
            raise FetchFailed("bad url")
        host = parts.hostname
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if not host.isascii():
            host = host.encode("idna").decode().lower()
        if host.replace(".", "").isdigit():
            with suppress(OSError):  # 2130706433 and 127.1 are addresses too
                host = socket.inet_ntoa(socket.inet_aton(host))
        quote = partial(urllib.parse.quote, safe=SAFE, errors="surrogateescape")
        path = quote(parts.path or "/")
        userinfo, at, _ = parts.netloc.rpartition("@")
        basic = base64.b64encode(urllib.parse.unquote_to_bytes(userinfo)).decode()
        authorization = f"Basic {basic}" if at else None
        address = (f"[{host}]" if ":" in host else host) + (f":{parts.port}" if parts.port else "")
        plain = urllib.parse.urlunsplit((parts.scheme, address, path, quote(parts.query), ""))
        return Target(plain, parts.scheme, host, port, authorization)


def _unpacked(body: bytes, max_bytes: int, truncate: int | None) -> bytes:
    """The content of a gzip or zlib stream, which may be cut off. Raises FetchFailed."""
    limit = max_bytes if truncate is None else truncate
    try:
        content = zlib.decompressobj(ZLIB_OR_GZIP).decompress(body, limit + 1)
    except zlib.error:
        raise FetchFailed(BAD_ENCODING) from None
    if truncate is None and len(content) > limit:
        raise FetchFailed("too large")
    return content[:limit]


def _redirected(target: Target, response: aiohttp.ClientResponse) -> Target:
    """The target of a redirect, which does not receive the credentials."""
    location = response.headers.get("Location")
    if location is None:
        raise FetchFailed("bad redirect")
    following = parse_url(urllib.parse.urljoin(target.url, location))
    return following._replace(authorization=None)


class _Resolver(AbstractResolver):
    """`socket.getaddrinfo` in a thread per lookup: slow name servers delay no other lookup."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        looked_up: Future[list[Any]] = Future()
        looked_up.set_running_or_notify_cancel()  # a late result is ignored

        def look_up() -> None:
            try:
                looked_up.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
            except Exception as error:
                looked_up.set_exception(_lookup_error(error))

        threading.Thread(target=look_up, daemon=True).start()
        async with asyncio.timeout(self.timeout):
            addresses = await asyncio.wrap_future(looked_up)
        return [
            ResolveResult(
                hostname=host, host=address[0], port=port, family=kind, proto=protocol,
                flags=socket.AI_NUMERICHOST,
            )
            for kind, _, protocol, _, address in addresses
        ]  # fmt: skip

    async def close(self) -> None:
        """Nothing to close."""


def _lookup_error(error: Exception) -> Exception:
    """A lookup's error, or the machine's: without a descriptor every host is unknown."""
    try:
        socket.socket().close()
    except OSError as shortage:
        return shortage
    return error
