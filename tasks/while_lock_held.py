"""Ends a pipeline whose flow has lost its lock: another builder does the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from artifacts.lock import Claim
from artifacts.store import Store
from tasks.import_beam_quietly import quiet_import

with quiet_import():
    import apache_beam as beam


class WhileLockHeld(beam.DoFn):
    """Runs another DoFn as long as the store names the owner of `claim`: asked for each element."""

    def __init__(self, dofn: beam.DoFn, store: str, claim: Claim) -> None:
        self.dofn, self.store, self.claim = dofn, store, claim

    def process(self, element: Any) -> Iterator[Any]:
        """Yield the DoFn's results. Raises LockLost."""
        self.claim.check(Store(self.store).fs)
        yield from self.dofn.process(element)
