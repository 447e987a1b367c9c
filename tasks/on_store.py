"""Runs a pipeline's DoFn for a store: under the flow's lock, with errors as in other stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from artifacts.lock import Claim
from artifacts.store import Store
from tasks.build_or_reuse import storing
from tasks.import_beam_quietly import quiet_import

with quiet_import():
    import apache_beam as beam


class OnStore(beam.DoFn):
    """Runs another DoFn, which writes to a store.

    Beam keeps an error's text alone, so this converts the store's errors before Beam sees them.

    Args:
        dofn: the other DoFn.
        store: URL of its store.
        claim: of the flow's lock, which is checked for each element; None: there is no lock.
    """

    def __init__(self, dofn: beam.DoFn, store: str, claim: Claim | None) -> None:
        self.dofn, self.store, self.claim = dofn, store, claim

    def process(self, element: Any) -> Iterator[Any]:
        """Yield the DoFn's results. Raises LockLost, StorageError, and what the DoFn raises."""
        store = Store(self.store)
        with storing(store):
            if self.claim is not None:
                self.claim.check(store.fs)
            yield from self.dofn.process(element)
