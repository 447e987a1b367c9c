"""Digests of JSON, bytes and streams, and JSON in a canonical form."""

from __future__ import annotations

import hashlib
import json
from typing import IO, Any

CHUNK = 2**20


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys, no spaces and no NaN: equal values give equal bytes."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def parse_json(text: str | bytes) -> Any:
    """The value of JSON text. Raises ValueError, also for nesting too deep for Python."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def digest_json(value: Any) -> str:
    """sha256 (hex) of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def digest_bytes(data: bytes) -> str:
    """sha256 (hex) of `data`."""
    return hashlib.sha256(data).hexdigest()


def digest_stream(stream: IO[bytes]) -> tuple[str, int]:
    """sha256 (hex) and byte count of the rest of `stream`."""
    digest, size = hashlib.sha256(), 0
    while chunk := stream.read(CHUNK):
        digest.update(chunk)
        size += len(chunk)
    return digest.hexdigest(), size
