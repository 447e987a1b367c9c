"""A web server of pictures, and of every kind of failure, for the download stage."""

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Self

from loopback_server import LoopbackServer
from picture_bytes import encode_picture, plain_picture
from PIL import Image


class Web:
    """A server of pictures at /good/<n> and of every kind of failure; it counts its requests."""

    def __init__(self, port: int = 0) -> None:
        self.requests: Counter[str] = Counter()
        self.robots: bytes | None = None  # robots.txt
        self.robots_requests = 0
        self.is_down = False
        self.broken: set[str] = set()  # numbers of the pictures that it answers with 503
        self.is_silent: Callable[[], bool] = lambda: False
        self.released = threading.Event()  # ends the silence, which lasts a minute at most
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with suppress(OSError):
                    web.answer(self)

        self.server = LoopbackServer(Handler, port)
        self.host = self.server.host

    def __enter__(self) -> Self:
        self.server.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.__exit__(*error)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path
        if path == "/robots.txt":
            return self.answer_robots(handler)
        self.requests[path] += 1
        name, _, number = path.partition("?")[0].strip("/").partition("/")
        if name == "silent" or self.is_silent():
            self.released.wait(60)
        if self.is_down or number in self.broken or (name == "flaky" and self.requests[path] == 1):
            self.reply(handler, 503)
        elif name in ("good", "flaky"):
            self.reply(handler, 200, picture(int(number)))
        elif name == "sized":  # sized/<width>x<height>
            width, _, height = number.partition("x")
            self.reply(handler, 200, plain_picture(int(width), int(height)))
        elif name == "rotated":
            self.reply(handler, 200, rotated_picture())
        elif name == "optout":
            self.reply(handler, 200, picture(0), {"X-Robots-Tag": "noai"})
        elif name == "away":
            self.reply(handler, 302, b"", {"Location": "http://169.254.169.254/latest"})
        elif name == "endless":
            handler.send_response(200)
            handler.end_headers()
            while True:
                handler.wfile.write(bytes(65536))
        else:
            self.reply(handler, *((200, b"<html>") if name == "html" else (404, b"")))

    def answer_robots(self, handler: BaseHTTPRequestHandler) -> None:
        self.robots_requests += 1
        self.reply(handler, 404 if self.robots is None else 200, self.robots or b"")

    def reply(
        self,
        handler: BaseHTTPRequestHandler,
        status: int,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
    ) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)


def picture(number: int) -> bytes:
    return plain_picture(40, 32, number * 9 % 256)


def rotated_picture() -> bytes:
    """40 x 32 when upright, red above blue; stored rotated, as phones do."""
    upright = Image.new("RGB", (40, 32), (220, 30, 30))
    upright.paste((30, 30, 220), (0, 16, 40, 32))
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees clockwise
    rotated = upright.transpose(Image.Transpose.ROTATE_90)
    return encode_picture(rotated, "JPEG", quality=95, exif=exif)
