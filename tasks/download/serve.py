"""Serve a folder on loopback for as long as a stage needs it."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

from tasks.download.errors import SourceError

LOOPBACK = "127.0.0.1"
Served = TypeVar("Served")


def check_port(port: int) -> None:
    """Raise SourceError unless `port` of the loopback address can be listened on (0 always can)."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(lambda: probe.bind((LOOPBACK, port)), port)
        # Two sockets may be bound to one port this way; only one may listen.
        _bind(probe.listen, port)


@contextmanager
def serve_folder(
    folder: Path, port: int, place: Callable[[str, tuple[str, ...]], Served]
) -> Iterator[Served]:
    """Serve `folder`, giving `place(base URL, the host:port that must be allowed)`."""
    handler = partial(_QuietHandler, directory=str(folder))
    server: _Server = _bind(lambda: _Server((LOOPBACK, port), handler), port)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        address = f"{LOOPBACK}:{server.server_address[1]}"
        yield place(f"http://{address}/", (address,))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """A line for every picture helps nobody."""


def _bind(bind: Callable[[], Any], port: int) -> Any:
    try:
        return bind()
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        why = "is in use" if error.errno == errno.EADDRINUSE else "needs privileges"
        raise SourceError(
            f"source.port: port {port} {why} on this machine: choose another, or 0 for a free one"
        ) from None
