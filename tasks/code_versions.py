"""Versions of this process's code and packages, on which the bytes of shards depend."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from artifacts.records import digest_bytes, digest_json
from configs.load_recipe import CHECKOUT
from runtimes.registry import interpreter, spec_of
from tasks.build_or_reuse import package_versions

#: Packages that decode, resize, encode and write.
SHARD_PACKAGES = (
    *("img2dataset", "numpy", "opencv-python-headless", "pillow", "pyarrow", "safetensors"),
    *("torch", "diffusers", "transformers"),
)
FOLDERS = ("artifacts", "configs", "runtimes", "tasks")


@lru_cache
def versions(runtime: str = "torch") -> dict[str, str]:
    """Package -> version in this process, and in the interpreter of a runtime's encoders.

    `Kilnworks` is a digest of our code. Raises WrongInput if the runtime is not installed.
    """
    ours = {"Kilnworks": CODE, **package_versions(sys.executable, SHARD_PACKAGES)}
    python, packages = interpreter(runtime), (*SHARD_PACKAGES, *spec_of(runtime).needs)
    theirs = package_versions(python, packages)
    if python == sys.executable:
        return ours | theirs
    return ours | {f"{name} ({runtime})": version for name, version in theirs.items()}


def _code_digest(root: Path = CHECKOUT) -> str:
    """Digest of our modules; an editor's files, such as the dangling link `.#a.py`, are none."""
    paths = (path for name in FOLDERS for path in (root / name).rglob("*.py"))
    found = {}
    for path in sorted(path for path in paths if not path.name.startswith(".")):
        with suppress(FileNotFoundError):
            found[path.relative_to(root).as_posix()] = digest_bytes(path.read_bytes())
    return digest_json(found)[:12]


#: Of the files at the time of the import: a worker of days runs the code that it began with.
CODE = _code_digest()
