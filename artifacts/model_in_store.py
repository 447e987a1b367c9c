"""Models in the store: copied there for other machines, and fetched there once per machine."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from filelock import FileLock
from fsspec.core import url_to_fs

from artifacts.cache_errors import caching
from artifacts.checksummed_files import put_atomic
from artifacts.delete_and_fetch_folders import fetch_files
from artifacts.download_or_find_model import ModelNotFound, cache_folder
from artifacts.store import Store

log = logging.getLogger("kiln")


def put_model(store: Store, digest: str, files: Mapping[str, Path]) -> str:
    """URL of a model's folder in the store, copied if it is not there.

    Args:
        digest: sha256 (hex) of the model's content, the name of the folder.
        files: relative path in the folder -> local file.
    """
    path = f"models/{digest}"
    done = f"{store.root}/{path}.json"
    if not store.fs.exists(done):
        log.info("copying %d files of a model to %s", len(files), store.url_of(path))
        for name, file in files.items():
            put_atomic(store.fs, str(file), f"{store.root}/{path}/{name}")
    # Last: it marks a complete copy. Its age is the time since the last use, for `kiln gc`.
    store.fs.pipe_file(done, b"{}")
    return store.url_of(path)


def fetch_model(url: str, digest: str, digest_of: Callable[[Path], str]) -> Path:
    """The local folder of a model of `put_model`, fetched to the cache once per machine.

    A damaged copy in the cache is fetched again.

    Args:
        digest_of: the digest of a local folder; it may raise ValueError.

    Raises:
        ModelNotFound: the store has no such model, or other bytes.
        CacheUnusable: the cache cannot be written.
    """
    target = cache_folder() / "models" / digest
    with caching(cache_folder()):
        target.parent.mkdir(parents=True, exist_ok=True)

    def is_whole() -> bool:
        with suppress(ValueError):  # of a damaged config.json
            return target.is_dir() and digest_of(target) == digest
        return False

    if is_whole():
        return target
    # The other workers of this machine wait.
    with caching(cache_folder()), FileLock(f"{target}.lock"):
        if not is_whole():
            if target.is_dir():
                log.warning("%s is fetched again: its local copy is damaged", url)
                shutil.rmtree(target)
            fs, root = url_to_fs(url)
            names = fs.find(root)
            if not names:
                raise ModelNotFound(f"model {url}: no files there")
            with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
                complete = Path(temporary, "model")
                fetch_files(fs, root, names, str(complete))
                if digest_of(complete) != digest:
                    raise ModelNotFound(
                        f"model {url}: it has other bytes than its name says: delete {url}.json, "
                        "and the next run copies it again"
                    )
                complete.rename(target)
    return target
