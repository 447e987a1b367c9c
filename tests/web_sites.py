"""Web sites on loopback: one with a robots.txt, and ones that a function answers for."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler

from loopback_server import LoopbackServer


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
