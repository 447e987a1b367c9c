"""Objects by Google Cloud Storage's rules: generations, conditional changes, listings by prefix.

Buckets are there by being named; of each object there is the live version alone.
"""

from __future__ import annotations

import threading
from base64 import b64encode
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import md5
from itertools import count
from typing import Any

import google_crc32c

Name = tuple[str, str]  # (bucket, object)
Query = dict[str, str]  # as Google names its parameters


class Refused(Exception):
    """An answer other than the one asked for."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Blob:
    """One generation of an object."""

    name: Name
    data: bytes
    generation: int
    updated: str
    content_type: str
    metadata: dict[str, str] = field(default_factory=dict)
    metageneration: int = 1
    components: int | None = None  # how many it was composed of: Google keeps no MD5 of such

    def resource(self) -> dict[str, Any]:
        """What Google says of it."""
        md5sum = {"md5Hash": b64encode(md5(self.data).digest()).decode()}
        return {
            "kind": "storage#object",
            "bucket": self.name[0],
            "name": self.name[1],
            "size": str(len(self.data)),
            "generation": str(self.generation),
            "metageneration": str(self.metageneration),
            "contentType": self.content_type,
            "metadata": self.metadata,
            "timeCreated": self.updated,
            "updated": self.updated,
            "etag": f"{self.generation}/{self.metageneration}",
            "crc32c": b64encode(google_crc32c.Checksum(self.data).digest()).decode(),
            **(md5sum if self.components is None else {"componentCount": self.components}),
        }


class Objects:
    """The objects of all buckets; each call is one atomic step. Raises Refused."""

    def __init__(self) -> None:
        self._blobs: dict[Name, Blob] = {}
        self._lock = threading.Lock()
        self._generations = count(1_700_000_000_000_000)

    def get(self, name: Name, query: Query) -> Blob:
        """The object, unless it is the generation that the asker has."""
        with self._lock:
            return self._live(name, query, known=304)

    def check(self, name: Name, query: Query) -> None:
        """Raise Refused unless an object might be put there now."""
        with self._lock:
            _check(self._blobs.get(name), query)

    def put(self, name: Name, data: bytes, resource: dict[str, Any], query: Query) -> Blob:
        """Put an object there, or a new generation of it."""
        with self._lock:
            return self._put(name, data, resource, query)

    def patch(self, name: Name, resource: dict[str, Any], query: Query) -> Blob:
        """Change what is said of an object; its generation stays."""
        with self._lock:
            blob = self._live(name, query)
            self._blobs[name] = replace(
                blob,
                content_type=resource.get("contentType", blob.content_type),
                metadata=blob.metadata | resource.get("metadata", {}),
                metageneration=blob.metageneration + 1,
            )
            return self._blobs[name]

    def delete(self, name: Name, query: Query) -> None:
        """Delete an object."""
        with self._lock:
            self._live(name, query)
            del self._blobs[name]

    def compose(self, name: Name, body: dict[str, Any], query: Query) -> Blob:
        """Join objects of a bucket into one."""
        with self._lock:
            parts = []
            for source in body["sourceObjects"]:
                asked = {**source, **source.get("objectPreconditions", {})}
                conditions = {key: str(value) for key, value in asked.items()}
                parts.append(self._live((name[0], source["name"]), conditions))
            resource = {"contentType": parts[0].content_type, **body.get("destination", {})}
            blob = self._put(name, b"".join(part.data for part in parts), resource, query)
            joined = sum(part.components or 1 for part in parts)
            self._blobs[name] = replace(blob, components=joined)
            return self._blobs[name]

    def rewrite(self, source: Name, name: Name, resource: dict[str, Any], query: Query) -> Blob:
        """Copy an object; parameters that begin with `source` or `ifSource` are of the old one."""
        conditions = {
            key.replace("ifSource", "if").replace("sourceG", "g"): value
            for key, value in query.items()
            if key.startswith(("ifSource", "sourceGeneration"))
        }
        with self._lock:
            blob = self._live(source, conditions)
            said = {"contentType": blob.content_type, "metadata": blob.metadata}
            copy = self._put(name, blob.data, said | resource, query)
            self._blobs[name] = replace(copy, components=blob.components)
            return self._blobs[name]

    def list(self, bucket: str, query: Query) -> dict[str, Any]:
        """A page of objects, and of the folders that `delimiter` makes of them."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        with self._lock:
            blobs = sorted((n[1], blob) for n, blob in self._blobs.items() if n[0] == bucket)
        rows: dict[str, Blob | None] = {}
        for name, blob in blobs:
            within = query.get("startOffset", "") <= name < query.get("endOffset", "\U0010ffff")
            if within and name.startswith(prefix):
                inside, cut, _ = name.removeprefix(prefix).partition(delimiter or "\0")
                rows |= {f"{prefix}{inside}{cut}": None} if cut else {name: blob}
        names = [name for name in rows if name > query.get("pageToken", "")]
        shown = names[: int(query.get("maxResults", 1000))]
        return {
            "kind": "storage#objects",
            "items": [blob.resource() for name in shown if (blob := rows[name])],
            "prefixes": [name for name in shown if rows[name] is None],
            **({"nextPageToken": shown[-1]} if len(shown) < len(names) else {}),
        }

    def _live(self, name: Name, query: Query, known: int = 412) -> Blob:
        blob = self._blobs.get(name)
        if blob is None or query.get("generation", str(blob.generation)) != str(blob.generation):
            raise Refused(404, f"No such object: {'/'.join(name)}")
        _check(blob, query, known)
        return blob

    def _put(self, name: Name, data: bytes, resource: dict[str, Any], query: Query) -> Blob:
        _check(self._blobs.get(name), query)
        self._blobs[name] = Blob(
            name,
            data,
            next(self._generations),
            datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            resource.get("contentType") or "application/octet-stream",
            resource.get("metadata") or {},
        )
        return self._blobs[name]


def _check(blob: Blob | None, query: Query, known: int = 412) -> None:
    """Raise Refused unless the conditions hold; what is not there is of generation 0."""
    for what in ("Generation", "Metageneration"):
        now = "0" if blob is None else str(getattr(blob, what.lower()))
        if query.get(f"if{what}Match", now) != now:
            raise Refused(412, f"if{what}Match does not hold")
        if query.get(f"if{what}NotMatch") == now:
            raise Refused(known, f"if{what}NotMatch does not hold")
