"""A server of chat completions on loopback, with faults in the order that a test lists."""

import base64
import json
import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler
from io import BytesIO

from loopback_server import LoopbackServer
from PIL import Image


class CaptionServer(LoopbackServer):
    """Captions a picture by its mean colour and the prompt.

    Args:
        faults: of the first requests: a status, `cut` for a connection that breaks, `nested` for an
            answer of 500,000 brackets, or `ok`.

    Attributes:
        asked: the prompt of each request that was answered.
        keys: the Authorization headers of all requests.
        most: the most requests at once.
    """

    def __init__(self, faults: Iterable[str | int] = (), text: str | None = None) -> None:
        super().__init__(_Handler)
        self.faults = list(faults)
        self.text = text
        self.asked: list[str] = []
        self.bodies: list[dict] = []
        self.keys: list[str | None] = []
        self.now = self.most = 0
        self.refuses: str | None = None  # pictures of this colour are answered with 500
        self.lock = threading.Lock()

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: CaptionServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with server.lock:
            server.keys.append(self.headers["Authorization"])
            fault = server.faults.pop(0) if server.faults else "ok"
            server.now += 1
            server.most = max(server.most, server.now)
        try:
            self._answer(fault, json.loads(body))
        finally:
            with server.lock:
                server.now -= 1

    def _answer(self, fault: str | int, request: dict) -> None:
        image, text = request["messages"][0]["content"]
        data = base64.b64decode(image["image_url"]["url"].partition(",")[2])
        pixel = Image.open(BytesIO(data)).convert("RGB").resize((1, 1)).getpixel((0, 0))
        colour = "#{:02x}{:02x}{:02x}".format(*pixel)
        if fault == "cut":
            self.close_connection = True
            return
        if fault == "nested":
            self._send(200, "[" * 500_000)
            return
        if isinstance(fault, int) or self.server.refuses == colour:
            self._send(fault if isinstance(fault, int) else 500, {"error": {"message": "not now"}})
            return
        with self.server.lock:
            self.server.asked.append(text["text"])
            self.server.bodies.append(request)
        caption = self.server.text or f"{text['text']} a picture of colour {colour}"
        message = {"role": "assistant", "content": caption}
        self._send(200, {"choices": [{"message": message, "finish_reason": "stop"}]})

    def _send(self, status: int, answer: dict | str) -> None:
        data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if status == 429:
            self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(data)
