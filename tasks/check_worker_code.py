"""Refuses workers whose code or packages differ from the flow's: their shards could differ, too."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import apache_beam as beam

from artifacts.hashing import digest_bytes, digest_json
from tasks.build_or_reuse import package_versions

#: Packages that decode, resize, encode and write.
PACKAGES = (
    *("img2dataset", "numpy", "opencv-python-headless", "pillow", "pyarrow", "safetensors"),
    *("torch", "diffusers", "transformers"),
)
FOLDERS = ("artifacts", "configs", "runtimes", "tasks")


class WorkerDiffers(ValueError):
    """A worker has other code or packages; the message names the host and the difference."""


class OnEqualWorkers(beam.DoFn):
    """Runs another DoFn where code and packages are those of the process that created this one."""

    def __init__(self, dofn: beam.DoFn) -> None:
        self.dofn, self.versions = dofn, versions()

    def process(self, element: Any) -> Iterator[Any]:
        """Yield the DoFn's results. Raises WorkerDiffers."""
        check_versions(self.versions)
        yield from self.dofn.process(element)


def check_versions(expected: Mapping[str, str]) -> None:
    """Raise WorkerDiffers if this process has other versions than the flow."""
    found = versions()
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise WorkerDiffers(
                f"beam: the worker on {socket.gethostname()} has {name} {found.get(name)}, the "
                f"flow {expected.get(name)}: install the same (deploy/workers) on both"
            )


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Package -> version in this process; `Kilnworks` is a digest of its code."""
    return {"Kilnworks": CODE, **package_versions(sys.executable, PACKAGES)}


def _code_digest() -> str:
    root = Path(__file__).parents[1]
    files = sorted(path for name in FOLDERS for path in (root / name).rglob("*.py"))
    found = {path.relative_to(root).as_posix(): digest_bytes(path.read_bytes()) for path in files}
    return digest_json(found)[:12]


#: Of the files at the time of the import: a worker of days runs the code that it began with.
CODE = _code_digest()
