"""Serve a folder over HTTP on loopback while a stage runs."""

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

from tasks.download.stage_errors import SourceError

LOOPBACK = "127.0.0.1"
Served = TypeVar("Served")


def check_port(port: int) -> None:
    """Raise SourceError unless a server can listen on `port` of loopback; 0 selects a free one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(lambda: probe.bind((LOOPBACK, port)), port)
        # SO_REUSEADDR lets two sockets bind one port, but only one of them can listen.
        _bind(probe.listen, port)


@contextmanager
def serve_folder(
    folder: Path, port: int, served_at: Callable[[str, tuple[str, ...]], Served]
) -> Iterator[Served]:
    """Serve `folder` and yield `served_at(base URL, (host:port,))`.

    Raises:
        SourceError: the port is in use or needs privileges.
    """
    handler = partial(_QuietHandler, directory=str(folder))
    server: _Server = _bind(lambda: _Server((LOOPBACK, port), handler), port)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        address = f"{LOOPBACK}:{server.server_address[1]}"
        yield served_at(f"http://{address}/", (address,))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Suppress the log line per request."""


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
