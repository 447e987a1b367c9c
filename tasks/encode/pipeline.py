"""The encode pipeline: one element an image shard, on whatever runner the recipe names."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.utils.shared import Shared

from artifacts.commit import Damaged, read_record
from artifacts.images import read_tar
from artifacts.store import Shard, Store
from runtimes.contract import PipelineEncoder, WrongInput
from runtimes.process.job import EncodeJob
from runtimes.registry import encodes_in_subprocess, open_encoder
from tasks.beam import Watch, run_linear
from tasks.encode.keys import STAGE
from tasks.encode.served import ServedEncoder
from tasks.encode.shard import encode_shard
from tasks.encode.transform import TransformSettings


@dataclass(frozen=True)
class Work:
    """One image shard to encode."""

    key: str  # of the latent shard
    tar: str  # URL
    sha256: str  # of the tar
    samples: int


class EncodeShard(beam.DoFn):
    """Commits the latent shard of each element, unless it is there and whole."""

    def __init__(
        self, store_url: str, encoders: EncodeJob, settings: TransformSettings, batch_size: int
    ) -> None:
        self.store_url, self.encoders = store_url, encoders
        self.settings, self.batch_size = settings, batch_size
        self._shared = Shared()

    def process(self, work: Work) -> Iterator[str]:
        """Yield the shard's key once it is committed."""
        store = Store(self.store_url)
        if store.shard(STAGE, work.key) is None:
            # Loaded once a process, and only when there is something to encode.
            encoder = self._shared.acquire(self._open)
            with tempfile.TemporaryDirectory(prefix="kiln-encode-") as folder:
                path = Path(folder) / "shard.safetensors"
                samples = read_tar(work.tar, work.sha256)
                facts = encode_shard(samples, encoder, self.settings, self.batch_size, path)
                store.commit_shard(STAGE, work.key, {".safetensors": str(path)}, facts)
        yield work.key

    def _open(self) -> PipelineEncoder:
        """In this process; or in one of its own where the runtime wants that."""
        apart = encodes_in_subprocess(self.encoders)
        return ServedEncoder(self.encoders) if apart else open_encoder(self.encoders)


class _Nothing:
    """What takes the encoders' place in Beam's cache of shared objects."""


def encode_shards(
    works: Sequence[Work],
    store: Store,
    dofn: EncodeShard,
    options: dict[str, Any],
    progress: Callable[[int, int, str], None],
) -> list[Shard]:
    """Commit every latent shard, and return them in the order of `works`.

    Raises WrongInput; Damaged if an image shard is not what was committed.
    """
    sizes = {work.key: work.samples for work in works}
    watch = Watch(store, STAGE, sizes, progress, unit="pictures")
    try:
        run_linear(works, dofn, options, watch, known=(WrongInput, Damaged))
    finally:
        # Beam keeps the last shared object for ever: let go of the encoders and their memory.
        Shared().acquire(_Nothing)
        _free_memory()
    return [_committed(store, work.key) for work in works]


def _free_memory() -> None:
    """Hand what the encoders took of the device back, for the stages that come next."""
    if "torch" in sys.modules:  # otherwise nothing was encoded here
        from runtimes.torch.device import free_memory

        free_memory()


def _committed(store: Store, key: str) -> Shard:
    """A shard that the pipeline has just verified or written: its record, not re-hashed."""
    record = read_record(store.fs, f"{store.shards_path(STAGE)}/{key}.json")
    if record is None:
        raise RuntimeError(f"encode shard {key[:12]}: the pipeline ended without committing it")
    return Shard(key, record["files"], record["meta"])
