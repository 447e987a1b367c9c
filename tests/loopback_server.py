"""HTTP servers of tests on loopback, and free ports there."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class LoopbackServer(ThreadingHTTPServer):
    """A server that answers while its context is open, and prints no log.

    Attributes:
        requests: (method, path) of each request so far, in the order that they came in.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, handler: type[BaseHTTPRequestHandler], port: int = 0) -> None:
        quiet = type(handler.__name__, (handler,), {"log_message": lambda *_: None})
        super().__init__(("127.0.0.1", port), quiet)
        self.host = f"127.0.0.1:{self.server_port}"
        self.url = f"http://{self.host}"
        self.requests: list[tuple[str, str]] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that have gone: a killed one cannot close its connections."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def free_port() -> int:
    """A port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def refusing() -> Iterator[str]:
    """The host:port of a server that refuses connections: it is bound, and nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"
