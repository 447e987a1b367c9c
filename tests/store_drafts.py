"""A draft, an artifact, a store as another machine sees it, and a file as a disk damages it."""

import os
import tarfile
from pathlib import Path
from typing import Any

from PIL import Image

from artifacts.lock import Lock
from artifacts.store import Artifact, Draft, KeyParts, Store

PARTS = KeyParts("encode", 1, {"resolution": 32}, {"images": "abc"})


def build(store: Store, parts: KeyParts = PARTS, lock: Lock | None = None) -> Draft:
    draft = store.draft(parts, lock)
    draft.write("a.bin", b"alpha")
    draft.write("sub/b.bin", b"beta", rows=3)
    return draft


def commit(store: Store, stage: str, files: dict[str, bytes], **summary: Any) -> Artifact:
    """An artifact with these files and no settings."""
    draft = store.draft(KeyParts(stage, 1, {}, {}))
    for path, data in files.items():
        draft.write(path, data)
    return draft.commit(summary, {"parents": {}})


def drawn_picture(store: Store, folder: Path) -> str:
    """The key of a shard with one grey picture of 8 x 8 pixels, as an evaluation names it."""
    png = folder / "00000.png"
    Image.new("RGB", (8, 8), "grey").save(png)
    with tarfile.open(folder / "drawn.tar", "w") as stream:
        stream.add(png, png.name)
    store.commit_shard("evaluate", "grey", {".tar": str(folder / "drawn.tar")}, {"pictures": 1})
    return "grey"


def elsewhere(store: Store) -> Store:
    """The same store, by a client that knows nothing of what ours has seen: another machine's."""
    other = Store(store.url)
    other.fs = type(store.fs)(**store.fs.storage_options, skip_instance_cache=True)
    return other


def flip(path: Path) -> None:
    """Another byte, at the same size and time stamp: what a failing disk does."""
    before, data = path.stat(), path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
