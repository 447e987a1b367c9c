"""Arrays that are encoded once by their content: references, and prompts that see references.

Shards of recent artifacts have what was encoded before. Each array has an id, a sha256 of all that
it depends on besides the settings. Shards are in the format of artifacts/references.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial

from artifacts.filesystems import ask_at_once
from artifacts.latent_shards import shard_key
from artifacts.records import FileEntry
from artifacts.references import ReferencePlace, read_reference_ids
from artifacts.store import Shard, Store
from tasks.build_or_reuse import recent_artifacts
from tasks.encode.crop_to_bucket import STAGE


@dataclass(frozen=True)
class EncodedOnce:
    """The arrays of some ids, in shards of one kind.

    Args:
        suffix: of the shards' files.
        alike: digest of the model and settings; a manifest has it in the shards' meta.
        wanted: ids of the arrays.
    """

    store: Store
    suffix: str
    alike: str
    wanted: Set[bytes]

    @cached_property
    def before(self) -> list[Shard]:
        """Whole shards of recent artifacts that have wanted arrays, without repetitions.

        What a damaged or missing one had is encoded again.
        """
        entries: dict[str, FileEntry] = {}
        for recent in recent_artifacts(self.store, STAGE):
            artifact = recent and self.store.load(STAGE, recent.key)
            for entry in artifact.files if artifact else ():
                if entry.path.endswith(self.suffix) and entry.meta["alike"] == self.alike:
                    entries.setdefault(shard_key(entry.path), entry)
        found = ask_at_once(self.store.fs, partial(self.store.shard, STAGE), sorted(entries))
        shards = [shard for shard in found if shard is not None]
        known = set[bytes]()
        chosen = []
        for shard, ids in zip(shards, self._ids(shards), strict=True):
            if not ids.keys().isdisjoint(self.wanted - known):
                known |= ids.keys()
                chosen.append(shard)
        return chosen

    @cached_property
    def missing(self) -> set[bytes]:
        """Ids that no shard before has."""
        return set(self.wanted).difference(*self._ids(self.before))

    def table(self, shards: Sequence[Shard]) -> tuple[list[ReferencePlace], dict[bytes, int]]:
        """Where each wanted array is, and id -> row in these places.

        Args:
            shards: all of the artifact; they are numbered in the order of their keys.
        """
        places: list[ReferencePlace] = []
        rows: dict[bytes, int] = {}
        ordered = sorted(shards, key=lambda shard: shard.key)
        for number, ids in enumerate(self._ids(ordered)):
            for sha256, (group, row) in ids.items():
                if sha256 in self.wanted and sha256 not in rows:
                    rows[sha256] = len(places)
                    places.append(ReferencePlace(number, group, row))
        return places, rows

    def _ids(self, shards: Sequence[Shard]) -> Iterator[dict[bytes, tuple[str, int]]]:
        def read(shard: Shard) -> dict[bytes, tuple[str, int]]:
            [entry] = shard.files
            place = f"{self.store.shards_path(STAGE)}/{entry.path}"
            return read_reference_ids(self.store.fs, place)

        return ask_at_once(self.store.fs, read, shards)
