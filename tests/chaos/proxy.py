"""A loopback proxy before a store's server: each process has its own, and faults happen there."""

from __future__ import annotations

import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from chaos.faults import Fault

CHANGES = {"PUT", "POST", "DELETE", "PATCH"}
ONE_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host", "expect"}
#: Answers without effect, as Google and Amazon word them.
REFUSALS = ((500, "InternalError"), (503, "SlowDown"), (429, "TooMany"), (400, "InvalidRequest"))


class Proxy(ThreadingHTTPServer):
    """One process' way to the server at `target`.

    Args:
        fired: called with each fault, and whether the request has had its effect: it kills, pauses,
            damages. What happens to requests happens here.
    """

    daemon_threads = True

    def __init__(self, target: str, fired: Callable[[Fault], None]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target, self.fired = urlsplit(target), fired
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.faults: list[Fault] = []
        self._count, self.away_until = 0, 0.0
        self._alone = threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def due(self, method: str) -> Fault | None:
        """The fault whose turn comes with this request."""
        with self._alone:
            self._count += 1
            if not self.faults or self._count < self.faults[0].after:
                return None
            needed = self.faults[0].kind in ("answer lost", "request twice", "request late")
            if needed and method not in CHANGES:
                return None
            self._count = 0
            return self.faults.pop(0)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A killed client closes no connections."""
        if not isinstance(sys.exc_info()[1], OSError | http.client.HTTPException):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def do_GET(self) -> None:
        body = self._body()
        fault = self.server.due(self.command)
        acts = fault is None or fault.kind != "killed" or fault.choice < 0.7
        if fault is not None:
            self.server.fired(fault)
        if time.monotonic() < self.server.away_until:
            self._hang_up()
            return
        match fault.kind if fault else "":
            case "cut off":
                assert fault is not None
                self.server.away_until = time.monotonic() + fault.seconds
                self._hang_up()
            case "request fails":
                assert fault is not None
                self._refuse(*REFUSALS[int(fault.choice * len(REFUSALS))])
            case "answer lost":
                self._ask(body)
                self._hang_up()
            case "request twice":
                self._ask(body)
                self._answer(*self._ask(body))
            case "request late":
                assert fault is not None
                threading.Timer(fault.seconds, self._ask, (body,)).start()
                self._hang_up()
            case "answer late":
                assert fault is not None
                answer = self._ask(body)
                time.sleep(fault.seconds)
                self._answer(*answer)
            case _:
                if acts:
                    self._answer(*self._ask(body))
                else:
                    self._hang_up()

    do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_GET  # noqa: N815 (http.server's names)

    def handle_expect_100(self) -> bool:
        """Let the client send its body: what waits in the buffer would never reach it."""
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _body(self) -> bytes:
        """The body of a request. Raises ConnectionError if the client ended before it was sent."""
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self._exactly(int(self.headers.get("Content-Length") or 0))
        data = b""
        while size := int(self.rfile.readline().partition(b";")[0] or b"0", 16):
            data += self._exactly(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return data

    def _exactly(self, size: int) -> bytes:
        data = self.rfile.read(size)
        if len(data) < size:
            raise ConnectionError("the client has gone")
        return data

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        target = self.server.target
        backend = http.client.HTTPConnection(str(target.hostname), target.port, timeout=30)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ONE_HOP}
        if body or self.command in CHANGES:
            headers["Content-Length"] = str(len(body))
        try:
            backend.request(self.command, self.path, body, headers)
            answer = backend.getresponse()
            found = [(k, v) for k, v in answer.getheaders() if k.lower() not in ONE_HOP]
            return answer.status, [*found, *self._length(answer)], answer.read()
        finally:
            backend.close()

    def _length(self, answer: http.client.HTTPResponse) -> list[tuple[str, str]]:
        length = answer.getheader("Content-Length")
        return [] if length is None else [("Content-Length", length)]

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
        self.send_response_only(status)
        if not any(name.lower() == "content-length" for name, _ in headers) and status != 204:
            headers = [*headers, ("Content-Length", str(len(data)))]
        for name, value in headers:
            here = value.replace(self.server.target.geturl(), self.server.url)
            self.send_header(name, here if name.lower() == "location" else value)
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>chaos</Message></Error>"
        if self.path.startswith(("/storage/", "/upload/", "/download/")):
            text = json.dumps({"error": {"code": status, "message": f"invalid: {code}"}})
        self._answer(status, [], text.encode() if self.command != "HEAD" else b"")

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)
