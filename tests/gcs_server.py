"""Google Cloud Storage's JSON API on loopback, for its real clients: STORAGE_EMULATOR_HOST=<url>.

It speaks no gRPC, so gcsfs needs GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT=false beside it: it would ask by
gRPC of what type each bucket is, and wait a minute for each answer.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from email import message_from_bytes, message_from_string
from http.server import BaseHTTPRequestHandler
from itertools import count
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from gcs_objects import Blob, Name, Objects, Query, Refused
from loopback_server import LoopbackServer


@dataclass
class Upload:
    """A resumable upload, and what has come of it."""

    name: Name
    resource: dict[str, Any]
    query: Query
    data: bytearray = field(default_factory=bytearray)


class GcsServer(LoopbackServer):
    """The server.

    Attributes:
        forbidden: a regular expression of requests (method and path, as `GET /...`) that are
            refused, as to somebody without permission.
        absent: name of a bucket that does not exist.
    """

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.objects = Objects()
        self.uploads: dict[str, Upload] = {}
        self.upload_ids = count(1)
        self.forbidden = "nothing"
        self.absent = ""


_BUCKET = "/storage/v1/b/(?P<bucket>[^/]+)"
_OBJECT = f"{_BUCKET}/o/(?P<object>[^/]+)"
#: (method, path, name of the handler's method)
_ROUTES = [
    ("GET", _BUCKET, "bucket"),
    ("GET", f"{_BUCKET}/o", "list"),
    ("GET", f"(?:/download)?{_OBJECT}", "get"),
    ("PATCH", _OBJECT, "patch"),
    ("DELETE", _OBJECT, "delete"),
    ("POST", f"{_OBJECT}/compose", "compose"),
    ("POST", f"{_OBJECT}/rewriteTo/b/(?P<to_bucket>[^/]+)/o/(?P<to_object>[^/]+)", "rewrite"),
    ("POST", f"/upload{_BUCKET}/o", "upload"),
    ("PUT", f"/upload{_BUCKET}/o", "upload"),
    ("DELETE", f"/upload{_BUCKET}/o", "cancel"),
]


class _Handler(BaseHTTPRequestHandler):
    server: GcsServer
    protocol_version = "HTTP/1.1"  # clients keep their connections
    wbufsize = -1  # headers and body leave together: apart, they cost 40 ms

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.query = dict(parse_qsl(url.query))
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append((self.command, unquote(url.path)))
        try:
            if re.search(self.server.forbidden, f"{self.command} {unquote(url.path)}"):
                raise Refused(403, "The caller has no access to the bucket")
            if f"/b/{self.server.absent}/" in f"{url.path}/":
                raise Refused(404, "The specified bucket does not exist.")
            self._route(url.path)
        except Refused as refused:
            error = {"code": refused.status, "message": str(refused)}
            self._say({"error": error}, refused.status)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815 (http.server's names)

    def _route(self, path: str) -> None:
        for method, pattern, name in _ROUTES:
            if method == self.command and (match := re.fullmatch(pattern, path)):
                self.parts = {key: unquote(part) for key, part in match.groupdict().items()}
                getattr(self, f"_{name}")()
                return
        raise Refused(404, f"Not Found: {self.command} {path}")

    @property
    def _name(self) -> Name:
        return self.parts["bucket"], self.parts["object"]

    @property
    def _json(self) -> dict[str, Any]:
        return dict(json.loads(self.body or b"{}"))

    def _send(self, data: bytes, status: int, **headers: str) -> None:
        self.send_response(status)
        if status not in (204, 304):  # which have no body
            self.send_header("Content-Length", str(len(data)))
        for header, value in headers.items():
            self.send_header(header.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data if status not in (204, 304) else b"")

    def _say(self, answer: dict[str, Any], status: int = 200) -> None:
        self._send(json.dumps(answer).encode(), status, Content_Type="application/json")

    def _bucket(self) -> None:
        self._say({"kind": "storage#bucket", "name": self.parts["bucket"]})

    def _list(self) -> None:
        self._say(self.server.objects.list(self.parts["bucket"], self.query))

    def _get(self) -> None:
        blob = self.server.objects.get(self._name, self.query)
        if self.query.get("alt") == "media":
            self._send_media(blob)
        else:
            self._say(blob.resource())

    def _send_media(self, blob: Blob) -> None:
        headers = {"Content_Type": blob.content_type, "X_Goog_Generation": str(blob.generation)}
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            self._send(blob.data, 200, **headers)
            return
        size = len(blob.data)
        first = int(asked[1]) if asked[1] else max(0, size - int(asked[2]))
        stop = min(int(asked[2]) + 1, size) if asked[1] and asked[2] else size
        if first >= size:
            raise Refused(416, "Request range not satisfiable")
        headers["Content_Range"] = f"bytes {first}-{stop - 1}/{size}"
        self._send(blob.data[first:stop], 206, **headers)

    def _patch(self) -> None:
        self._say(self.server.objects.patch(self._name, self._json, self.query).resource())

    def _delete(self) -> None:
        self.server.objects.delete(self._name, self.query)
        self._send(b"", 204)

    def _compose(self) -> None:
        self._say(self.server.objects.compose(self._name, self._json, self.query).resource())

    def _rewrite(self) -> None:
        target = self.parts["to_bucket"], self.parts["to_object"]
        blob = self.server.objects.rewrite(self._name, target, self._json, self.query)
        size = str(len(blob.data))
        sizes = {"objectSize": size, "totalBytesRewritten": size}
        self._say({"done": True, **sizes, "resource": blob.resource()})

    def _upload(self) -> None:
        if "upload_id" in self.query:
            self._resume()
        elif self.query["uploadType"] == "resumable":
            self._begin()
        else:
            media = self.query["uploadType"] == "media"
            resource, data = ({"name": self.query["name"]}, self.body) if media else self._related()
            name = self.parts["bucket"], resource["name"]
            self._say(self.server.objects.put(name, data, resource, self.query).resource())

    def _related(self) -> tuple[dict[str, Any], bytes]:
        """What a `multipart/related` body says of an object, and the object."""
        headers = f"Content-Type: {self.headers['Content-Type']}\n\n"
        boundary = f"--{message_from_string(headers).get_boundary()}".encode()
        _, said, rest = self.body.split(boundary, 2)
        line = b"\r\n" if rest.startswith(b"\r\n") else b"\n"
        head, data = rest[: rest.rindex(line + boundary)].split(line * 2, 1)
        kind = message_from_bytes(head.lstrip()).get_content_type()
        described = str(message_from_bytes(said.lstrip()).get_payload())
        return {"contentType": kind, **json.loads(described)}, data

    def _begin(self) -> None:
        kind = self.headers.get("X-Upload-Content-Type")
        resource = {"name": self.query.get("name"), "contentType": kind, **self._json}
        name = self.parts["bucket"], str(resource["name"])
        self.server.objects.check(name, self.query)
        upload = str(next(self.server.upload_ids))
        self.server.uploads[upload] = Upload(name, resource, self.query)
        self._send(b"", 200, Location=f"{self.server.url}{self.path}&upload_id={upload}")

    def _resume(self) -> None:
        upload = self._unfinished()
        sent = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", self.headers["Content-Range"])
        if sent is None:
            raise Refused(400, "Content-Range is invalid")
        if sent[1]:
            upload.data[int(sent[1]) :] = self.body  # what is sent again replaces what was there
        if sent[2] == "*" or len(upload.data) < int(sent[2]):
            have = {"Range": f"bytes=0-{len(upload.data) - 1}"} if upload.data else {}
            self._send(b"", 308, **have)
            return
        put = self.server.objects.put
        blob = put(upload.name, bytes(upload.data), upload.resource, upload.query)
        self.server.uploads.pop(self.query["upload_id"], None)
        self._say(blob.resource())

    def _cancel(self) -> None:
        self._unfinished()
        self.server.uploads.pop(self.query["upload_id"], None)
        self._send(b"", 499)

    def _unfinished(self) -> Upload:
        try:
            return self.server.uploads[self.query["upload_id"]]
        except KeyError:
            raise Refused(410, "The upload is not there, or is finished") from None
