"""Compiled programs, kept in the store: a machine that takes over need not compile them again.

A compiler's own cache is a local folder whose file names are digests of what was compiled. That of
a local store is used in place; that of a remote one is copied here first, and what is new back.
What goes wrong with it costs time, and no more.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Callable
from pathlib import Path

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from artifacts.models import cache_folder

log = logging.getLogger("kiln")


class CompileCache:
    """The folder of one compiler's programs.

    Args:
        url: where they are kept, any fsspec URL; None keeps none.
        kind: which compiler's, such as `xla-2.9.0`.

    Attributes:
        path: the local folder, or None.
    """

    def __init__(self, url: str | None, kind: str) -> None:
        self.path: Path | None = None
        self._kept: set[str] = set()  # names of what is in the store
        self._remote = ""
        if url is None:
            return
        self._fs, root = url_to_fs(url)
        folder = f"{root}/{kind}"
        if isinstance(self._fs, LocalFileSystem):
            self.path = Path(folder)
        else:
            self._remote = folder
            digest = hashlib.sha256(f"{url}/{kind}".encode()).hexdigest()
            self.path = cache_folder() / "compiled" / digest[:16]
        self.path.mkdir(parents=True, exist_ok=True)
        if self._remote:
            self._try(self._fetch)

    def upload(self) -> None:
        """Copy what was compiled since to the store."""
        if self._remote:
            self._try(self._send)

    def _fetch(self, path: Path) -> None:
        if not self._fs.exists(self._remote):
            return
        sizes = {e["name"].rpartition("/")[2]: e["size"] for e in self._fs.ls(self._remote)}
        for name, size in sorted(sizes.items()):
            local = path / name
            if not local.is_file() or local.stat().st_size != size:
                part = path / f".{uuid.uuid4().hex}"
                self._fs.get_file(f"{self._remote}/{name}", str(part))
                part.replace(local)
            self._kept.add(name)

    def _send(self, path: Path) -> None:
        here = {p.name for p in path.iterdir() if p.is_file() and not p.name.startswith(".")}
        for name in sorted(here - self._kept):
            self._fs.put_file(str(path / name), f"{self._remote}/{name}")
            self._kept.add(name)

    def _try(self, copy: Callable[[Path], None]) -> None:
        assert self.path is not None
        try:
            copy(self.path)
        except Exception as error:  # the clients of remote stores have kinds of their own
            log.warning("compiled programs are not kept in the store: %s", error)
