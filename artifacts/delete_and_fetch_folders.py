"""Delete or fetch a whole folder by its exact path.

fsspec's `rm` and `get` take `[`, `*` and `?` in a bucket's path for a pattern: they would delete or
copy what another folder has.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

from fsspec import AbstractFileSystem
from fsspec.asyn import sync

from artifacts.concurrent_requests import ask_at_once
from artifacts.remote_client_options_and_errors import protocols

#: The most objects that S3 deletes by one request.
S3_BULK = 1000


def delete_tree(fs: AbstractFileSystem, path: str) -> None:
    """Delete a file, or a folder with all its content. Raises as the filesystem does."""
    known = protocols(fs)
    if not known & {"gs", "s3"}:
        fs.rm(path, recursive=True)  # a local path is never a pattern
        return
    found = fs.find(path)
    # One request for many must have a checksum, of a kind that differs between stores of S3.
    if "s3" in known and fs.is_of_amazon:
        for start in range(0, len(found), S3_BULK):
            sync(fs.loop, fs._bulk_delete, found[start : start + S3_BULK])
        return

    def delete(name: str) -> None:
        with suppress(FileNotFoundError):  # another process was first
            fs.rm_file(name)

    for _ in ask_at_once(fs, delete, found):
        pass


def fetch_files(fs: AbstractFileSystem, root: str, names: Iterable[str], folder: str) -> None:
    """Copy files to a local folder, each at its path below `root`.

    Args:
        names: paths of files below `root`, or `root` itself, as `fs.find(root)` gives them.

    Raises:
        ValueError: a name leads out of the folder.
    """
    top = root.rstrip("/")
    wanted = [name for name in names if not name.endswith("/")]  # a bucket's marker of a folder
    for name in wanted:
        if not f"{name}/".startswith(f"{top}/") or ".." in name.split("/"):
            raise ValueError(f"{name!r} leads out of its folder")
    local = [f"{folder}{name[len(top) :]}" for name in wanted]
    for parent in {os.path.dirname(path) for path in local}:
        os.makedirs(parent, exist_ok=True)
    fs.get(wanted, local)  # lists are taken as they are
