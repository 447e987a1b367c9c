"""Cache of compiled programs in the store, so that another machine need not recompile them.

A compiler's own cache is a local folder; its file names are digests of the compiled programs. A
local store's folder serves directly. A remote store's folder is downloaded first, and new files
are uploaded. A failure costs compile time only, so it is a warning.
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
    """The cache folder of one compiler.

    Args:
        url: fsspec URL of the folder of all compilers; None disables the cache.
        kind: compiler and version, such as `xla-2.9.0`.

    Attributes:
        path: the local folder for the compiler; None if disabled.
    """

    def __init__(self, url: str | None, kind: str) -> None:
        self.path: Path | None = None
        self._stored: set[str] = set()  # names of the files in the store
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
        """Upload new programs to a remote store."""
        if self._remote:
            self._try(self._upload_new)

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
            self._stored.add(name)

    def _upload_new(self, path: Path) -> None:
        here = {p.name for p in path.iterdir() if p.is_file() and not p.name.startswith(".")}
        for name in sorted(here - self._stored):
            self._fs.put_file(str(path / name), f"{self._remote}/{name}")
            self._stored.add(name)

    def _try(self, copy: Callable[[Path], None]) -> None:
        assert self.path is not None
        try:
            copy(self.path)
        except Exception as error:  # clients of remote stores define their own exception types
            log.warning("compiled programs are not kept in the store: %s", error)
