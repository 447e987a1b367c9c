"""The code that the workers of a slice run: a packed part of this checkout."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from pathlib import Path

from artifacts.image_shards import add_member
from artifacts.models import files_below
from configs.load_recipe import CHECKOUT

#: The parts of a checkout that the workers need.
PACKED = (
    *("Makefile", "pyproject.toml", "requirements", "deploy/tpu"),  # deploy/server/.env is secret
    *("artifacts", "configs", "runtimes"),
)


def pack_code() -> bytes:
    """A gzipped tar of the PACKED files, deterministic for equal code."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(p for name in PACKED for p in _files(CHECKOUT / name)):
            name, mode = str(path.relative_to(CHECKOUT)), path.stat().st_mode & 0o777
            add_member(tar, name, path.read_bytes(), mode)
    return gzip.compress(buffer.getvalue(), compresslevel=6, mtime=0)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [p for p in files_below(path) if "__pycache__" not in p.parts]


def code_home(code: bytes) -> str:
    """The folder of this code on a worker, relative to the home folder."""
    return f"kiln-{hashlib.sha256(code).hexdigest()[:12]}"
