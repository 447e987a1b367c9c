"""Refuses workers whose code or packages differ from the flow's: their shards could differ, too."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from typing import Any

import apache_beam as beam

from tasks.code_versions import versions


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
