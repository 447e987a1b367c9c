"""The encode pipeline on Beam: one element per image shard."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.utils.shared import Shared

from artifacts.commit import Damaged
from artifacts.image_shards import read_tar
from artifacts.resolve_model import ModelNotFound
from artifacts.store import Shard, Store
from runtimes.contract import PipelineEncoder, WrongInput
from runtimes.process.job import EncodeJob
from runtimes.registry import encodes_in_subprocess, open_encoder
from tasks.beam import ShardProgress, run_linear
from tasks.encode.decode_and_crop import TransformSettings
from tasks.encode.encode_shard import encode_shard
from tasks.encode.encoder_client import ServedEncoder
from tasks.encode.encoders_in_store import EncodersInStore
from tasks.encode.keys import STAGE
from tasks.worker_reports import WorkerReports, shard_counts, worker_report


@dataclass(frozen=True)
class EncodeTask:
    """One image shard to encode."""

    key: str  # of the latent shard
    tar: str  # URL
    sha256: str  # of the tar
    samples: int


class EncodeShard(beam.DoFn):
    """Commits the latent shard of each element, unless the store has it intact."""

    def __init__(
        self,
        store_url: str,
        reports: str,
        encoders: EncodeJob,
        settings: TransformSettings,
        batch_size: int,
        copy: EncodersInStore | None = None,  # for workers without the folders of `encoders`
    ) -> None:
        self.store_url, self.reports = store_url, reports
        self.encoders, self.copy = encoders, copy
        self.settings, self.batch_size = settings, batch_size
        self._shared = Shared()

    def process(self, task: EncodeTask) -> Iterator[str]:
        """Yield the shard's key once it is committed."""
        store = Store(self.store_url)
        shard = store.shard(STAGE, task.key)
        if shard is None:
            # Loaded once per process, at the first shard to encode.
            encoder = self._shared.acquire(self._open)
            with tempfile.TemporaryDirectory(prefix="kiln-encode-") as folder:
                path = Path(folder) / "shard.safetensors"
                samples = read_tar(task.tar, task.sha256)
                facts = encode_shard(samples, encoder, self.settings, self.batch_size, path)
                files = {".safetensors": str(path)}
                shard = store.commit_shard(STAGE, task.key, files, facts)
        written, failed = sum(entry.size for entry in shard.files), shard.meta["bad_reasons"]
        counts = shard_counts(task.samples, failed, written, is_new=shard.is_new)
        worker_report(self.store_url, self.reports).add(task.key, counts)
        yield task.key

    def _open(self) -> PipelineEncoder:
        """The encoder, in a separate process if the runtime has its own environment."""
        job = self.encoders if self.copy is None else self.copy.fetched(self.encoders)
        return ServedEncoder(job) if encodes_in_subprocess(job) else open_encoder(job)


class _Placeholder:
    """Replaces the encoders in Beam's cache of shared objects."""


def encode_shards(
    tasks: Sequence[EncodeTask],
    store: Store,
    dofn: EncodeShard,
    options: dict[str, Any],
    progress: Callable[[int, int, str], None],
) -> list[Shard]:
    """Commit every latent shard, and return them in the order of `tasks`.

    Raises WrongInput; Damaged if an image shard is not the committed one.
    """
    sizes = {task.key: task.samples for task in tasks}
    watch = ShardProgress(store, dofn.reports, sizes, progress, unit="pictures")
    reports = WorkerReports(store, dofn.reports)
    reports.clear()  # of an earlier run
    try:
        run_linear(tasks, dofn, options, watch, known=(WrongInput, Damaged, ModelNotFound))
        reports.clear()
    finally:
        # Beam keeps a reference to the last shared object. A new one releases the encoders.
        Shared().acquire(_Placeholder)
        _free_memory()
    found = [shard for shard in store.committed_shards(STAGE, sizes) if shard is not None]
    if len(found) < len(sizes):
        raise RuntimeError("encode: the pipeline ended without committing every shard")
    return found


def _free_memory() -> None:
    """Release the encoders' device memory for the next stages."""
    if "torch" in sys.modules:  # otherwise this process has encoded nothing
        from runtimes.torch.device import free_memory

        free_memory()
