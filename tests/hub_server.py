"""A server with the Hugging Face hub's API on loopback, for its real client: HF_ENDPOINT=<url>.

Large files redirect to another host, as on the hub. Each repository has one branch, `main`.
Uploads need a token of `writers`; large files come by the LFS protocol, before their commit.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from loopback_server import LoopbackServer

#: Suffixes of large files (LFS), which are served behind a redirect.
LARGE = (".safetensors", ".parquet")


@dataclass
class Repository:
    """A repository: its files by path, and its readers."""

    files: dict[str, bytes]
    accepted_by: set[str] | None = None  # tokens with access; None: not gated
    private: bool = False
    large: dict[str, bytes] = field(default_factory=dict)  # uploaded files by sha256

    @property
    def commit(self) -> str:
        """The commit hash, a digest of the files."""
        digests = {path: hashlib.sha1(data).hexdigest() for path, data in self.files.items()}
        return hashlib.sha1(json.dumps(digests, sort_keys=True).encode()).hexdigest()


class HubServer(LoopbackServer):
    """The server.

    Attributes:
        repositories: repositories by name; data sets as `datasets/<name>`.
        writers: tokens that may create repositories and commit.
        stop_after: number of further large files that are accepted; None: all.
        fault: fault of every response: an HTTP status; `page`, an HTML page of another site;
            `cut`, only the first half of a file.
    """

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.repositories: dict[str, Repository] = {}
        self.writers: set[str] = set()
        self.stop_after: int | None = None
        self.fault: int | str | None = None


class Refused(Exception):
    """An error response."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


_REPOSITORY = "(?P<kind>datasets/|)(?P<name>[^/]+/[^/]+)"
_API = "/api/(?P<kind>models/|datasets/)(?P<name>[^/]+/[^/]+)"
#: (path, name of the handler's method)
_ROUTES = [
    (f"{_API}", "revision"),
    (f"{_API}/revision/(?P<revision>[^/]+)", "revision"),
    (f"{_API}/tree/(?P<revision>[^/]+)(?:/(?P<path>.+))?", "tree"),
    (f"/{_REPOSITORY}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
    (f"/large/{_REPOSITORY}/(?P<path>.+)", "large"),
]
_UPLOADS = [
    (f"{_API}/preupload/(?P<revision>[^/]+)", "preupload"),
    (f"/{_REPOSITORY}.git/info/lfs/objects/batch", "batch"),
    (f"/upload/{_REPOSITORY}/(?P<oid>[0-9a-f]+)", "upload"),
    (f"{_API}/commit/(?P<revision>[^/]+)", "commit"),
]


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"  # with persistent connections
    wbufsize = -1  # send headers and body together

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.server.requests.append((self.command, unquote(path)))
        try:
            if isinstance(self.server.fault, int):
                raise Refused(self.server.fault, "", "Internal Error")
            if self.server.fault == "page":
                self._send(b"<html>Please log in to the network</html>")
            else:
                self._route(path)
        except Refused as refused:
            headers = {"X_Error_Code": refused.code, "X_Error_Message": str(refused)}
            self._send(json.dumps({"error": str(refused)}).encode(), refused.status, **headers)

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815 (http.server's names)

    def _route(self, path: str) -> None:
        is_upload = self.command in ("POST", "PUT")
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        is_open = path == "/api/validate-yaml" or path.startswith("/upload/")
        if is_upload and not is_open and self._token not in self.server.writers:
            raise Refused(403 if self._token else 401, "", "Unauthorized")
        if path == "/api/whoami-v2":
            if self._token not in self.server.writers:
                raise Refused(401, "", "Invalid username or password.")
            self._send_json({"name": "tests", "type": "user"})
            return
        if path == "/api/repos/create":
            self._create(json.loads(self.body))
            return
        if path == "/api/validate-yaml":
            self._send_json({"errors": [], "warnings": []})
            return
        for pattern, name in _UPLOADS if is_upload else _ROUTES:
            if match := re.fullmatch(pattern, path):
                self.parts = {key: unquote(part or "") for key, part in match.groupdict().items()}
                getattr(self, f"_{name}")(self._repository())
                return
        raise Refused(404, "", f"Not Found: {path}")

    @property
    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _repository(self) -> Repository:
        kind = "datasets/" if self.parts["kind"] == "datasets/" else ""
        found = self.server.repositories.get(kind + self.parts["name"])
        if found is None:  # the hub does not tell private from missing
            raise Refused(404 if self._token else 401, "RepoNotFound", "Repository not found")
        readers = found.accepted_by or self.server.writers
        is_signed = self.path.startswith(("/large/", "/upload/"))  # another host's address
        if found.private and not is_signed and self._token not in readers:
            raise Refused(404 if self._token else 401, "RepoNotFound", "Repository not found")
        if self.parts.get("revision", "main") not in ("main", found.commit):
            raise Refused(404, "RevisionNotFound", "Invalid rev id")
        return found

    def _send(
        self, data: bytes, status: int = 200, stop: int | None = None, **headers: str
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for header, value in headers.items():
            self.send_header(header.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:stop])
            self.close_connection = self.close_connection or stop is not None

    def _send_json(self, answer: object) -> None:
        self._send(json.dumps(answer).encode(), Content_Type="application/json")

    def _revision(self, found: Repository) -> None:
        names = [{"rfilename": path} for path in sorted(found.files)]
        facts = {"private": found.private, "siblings": names}
        self._send_json({"id": self.parts["name"], "sha": found.commit, **facts})

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        status = 409 if name in self.server.repositories else 200
        new = Repository({}, private=asked.get("visibility") == "private")
        self.server.repositories.setdefault(name, new)
        answer = {"url": f"{self.server.url}/{name}", "name": name}
        self._send(json.dumps(answer).encode(), status)

    def _preupload(self, found: Repository) -> None:
        """How to upload each file, and the object id that the repository has of it."""
        answers = []
        for one in json.loads(self.body)["files"]:
            path = one["path"]
            mode = "lfs" if path.endswith(LARGE) else "regular"
            oid = _oid(path, found.files[path]) if path in found.files else None
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._send_json({"files": answers})

    def _batch(self, found: Repository) -> None:
        """Where to upload the large files that the repository lacks."""
        stored = {hashlib.sha256(data).hexdigest() for data in found.files.values()}
        answers = []
        for one in json.loads(self.body)["objects"]:
            answer = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in stored | found.large.keys():
                where = f"{self.server.url}/upload/{self.parts['name']}/{one['oid']}"
                answer["actions"] = {"upload": {"href": where, "header": {}}}
            answers.append(answer)
        self._send_json({"objects": answers})

    def _upload(self, found: Repository) -> None:
        if self.server.stop_after == 0:
            raise Refused(403, "", "The connection was lost")  # which the client does not repeat
        if self.server.stop_after is not None:
            self.server.stop_after -= 1
        assert hashlib.sha256(self.body).hexdigest() == self.parts["oid"]
        found.large[self.parts["oid"]] = self.body
        self._send(b"")

    def _commit(self, found: Repository) -> None:
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                found.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                found.files[value["path"]] = found.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del found.files[value["path"]]
        url = f"{self.server.url}/{self.parts['name']}/commit/{found.commit}"
        self._send_json({"commitUrl": url, "commitOid": found.commit})

    def _tree(self, found: Repository) -> None:
        folder = f"{self.parts['path']}/" if self.parts["path"] else ""
        is_recursive = "recursive=true" in self.path.lower()
        below = sorted(path for path in found.files if path.startswith(folder))
        rows = {path: _entry(path, found.files[path]) for path in below}
        for path in below:
            inside = path.removeprefix(folder).split("/")
            for depth in range(1, len(inside)):
                name = folder + "/".join(inside[:depth])
                rows[name] = {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
        self._send_json(
            [r for p, r in rows.items() if is_recursive or "/" not in p.removeprefix(folder)]
        )

    def _resolve(self, found: Repository) -> None:
        path = self.parts["path"]
        if found.accepted_by is not None and self._token not in found.accepted_by:
            reason = f"Access to model {self.parts['name']} is restricted."
            raise Refused(403 if self._token else 401, "GatedRepo", reason)
        if path not in found.files:
            raise Refused(404, "EntryNotFound", "Entry not found")
        headers = {"X_Repo_Commit": found.commit, "ETag": f'"{_oid(path, found.files[path])}"'}
        if not path.endswith(LARGE):
            self._send_file(found.files[path], headers)
            return
        elsewhere = self.server.url.replace("127.0.0.1", "localhost")
        headers |= {
            "X_Linked_ETag": headers["ETag"],
            "X_Linked_Size": str(len(found.files[path])),
            "Location": f"{elsewhere}/large/{self.parts['kind']}{self.parts['name']}/{path}",
        }
        self._send(b"", 302, **headers)

    def _large(self, found: Repository) -> None:
        self._send_file(found.files[self.parts["path"]], {})

    def _send_file(self, data: bytes, headers: dict[str, str]) -> None:
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        half = len(data) // 2 if self.server.fault == "cut" else None
        if span is None:
            self._send(data, 200, half, **headers)
            return
        first, stop = int(span[1]), min(int(span[2] or len(data)) + 1, len(data))
        headers["Content_Range"] = f"bytes {first}-{stop - 1}/{len(data)}"
        self._send(data[first:stop], 206, half, **headers)


def _oid(path: str, data: bytes) -> str:
    """The object id of a file: git's blob digest, or the sha256 of a large file."""
    if path.endswith(LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(path: str, data: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": path, "size": len(data), "oid": _oid(path, data)}
    if path.endswith(LARGE):
        entry["lfs"] = {"oid": entry["oid"], "size": len(data), "pointerSize": 134}
    return entry
