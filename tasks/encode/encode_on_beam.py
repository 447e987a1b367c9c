"""The encode pipeline on Beam: one element per image shard."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import apache_beam as beam
from apache_beam.utils.shared import Shared

from artifacts.records import Damaged
from artifacts.store import Shard, Store
from runtimes.registry import encoder_devices
from tasks.beam.pipeline import ShardProgress, run_linear
from tasks.beam.workers import WorkerReports, Workers, shard_counts, worker_report, workers_of
from tasks.child_process import ProcessLost
from tasks.encode.crop_to_bucket import STAGE
from tasks.encode.encoder_processes import (
    SHARDS_PER_DEVICE,
    EncoderPool,
    EncodersInStore,
    EncodingPlan,
)
from tasks.encode.near_duplicates import SUFFIX, ImageShard


@dataclass(frozen=True)
class EncodeTask:
    """One image shard to encode."""

    key: str  # of the latent shard
    tar: str  # URL
    sha256: str  # of the tar
    samples: int


class EncodeShard(beam.DoFn):
    """Commits the latent shard of each element, unless the store has it intact.

    Args:
        store_url: URL of the store.
        reports: folder of the workers' reports.
        plan: encoders and settings.
        processes: encoder processes per machine, see encoder_devices.
        copy: for workers without the folders of `plan`.
        waits: whether it waits for shards that others encode; otherwise it leaves them out.
    """

    def __init__(
        self,
        store_url: str,
        reports: str,
        plan: EncodingPlan,
        processes: int | None = None,
        copy: EncodersInStore | None = None,
        waits: bool = True,
    ) -> None:
        self.store_url = store_url
        self.reports = reports
        self.plan = plan
        self.copy = copy
        self.processes = processes
        self.waits = waits
        self.run = uuid4().hex
        self._shared = Shared()

    def process(self, task: EncodeTask) -> Iterator[str]:
        """Yield the shard's key once it is committed."""
        store = Store(self.store_url)
        try:
            shard = store.shard(STAGE, task.key) or self._built(store, task)
        except _Busy:
            return
        written = sum(entry.size for entry in shard.files)
        failed = shard.meta["bad_reasons"]
        counts = shard_counts(task.samples, failed, written, is_new=shard.is_new)
        worker_report(self.store_url, self.reports, self.run).add(task.key, counts)
        yield task.key

    def _built(self, store: Store, task: EncodeTask) -> Shard:
        """The shard, encoded here, or by another process during the wait. Raises _Busy."""
        with store.shard_lock(STAGE, task.key, self._wait):
            if (shard := store.shard(STAGE, task.key)) is not None:
                return shard
            with tempfile.TemporaryDirectory(prefix="kiln-encode-") as folder:
                path = f"{folder}/shard.safetensors"
                facts = self.open().encode(task.tar, task.sha256, path)
                shard = store.commit_shard(STAGE, task.key, {".safetensors": path}, facts)
                if self.plan.settings.holdout:
                    image = ImageShard(task.tar, task.sha256, self.plan.settings.max_pixels)
                    thumbnails = {SUFFIX: f"{folder}/shard{SUFFIX}"}
                    store.commit_shard(STAGE, image.key, thumbnails, {})
                return shard

    def _wait(self, owner: dict[str, Any]) -> None:
        if not self.waits:
            raise _Busy

    def open(self, make: Callable[[], EncoderPool] | None = None) -> EncoderPool:
        """The encoders of this process, loaded at the first call and kept while they are in use."""
        encoders: EncoderPool = self._shared.acquire(make or self._loaded)
        return encoders

    def _loaded(self) -> EncoderPool:
        Shared().acquire(_Placeholder)  # which releases those of the last run
        job = self.plan.job if self.copy is None else self.copy.fetched(self.plan.job)
        return EncoderPool(replace(self.plan, job=job), self.processes)


class _Busy(Exception):
    """Another process encodes the shard."""


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

    Several flows may call it for the same shards: each encodes those that nobody else does.

    Raises Refused; Damaged if an image shard differs from the committed shard; LockLost.
    """
    sizes = {task.key: task.samples for task in tasks}
    watch = ShardProgress(store, dofn.reports, sizes, progress, unit="pictures")
    reports = WorkerReports(store, dofn.reports)
    reports.clear()  # of an earlier run
    is_here = workers_of(options) is Workers.THREADS
    devices = len(encoder_devices(dofn.plan.job, dofn.processes)) if is_here else 1

    def run(some: Sequence[EncodeTask], *, waits: bool) -> None:
        dofn.waits = waits
        known = (Damaged, ProcessLost)
        threads = devices * SHARDS_PER_DEVICE
        run_linear(some, dofn, options, watch, threads=threads, known=known)

    try:
        run(tasks, waits=False)
        shards = list(store.committed_shards(STAGE, sizes))
        if None in shards:
            others = worker_report(store.url, dofn.reports, dofn.run)
            for task, shard in zip(tasks, shards, strict=True):
                if shard is not None:  # also those of other flows, which no report here has
                    others.add(task.key, {})
            run([t for t, shard in zip(tasks, shards, strict=True) if shard is None], waits=True)
            shards = list(store.committed_shards(STAGE, sizes))
    finally:
        reports.clear()
        # The next stages need the device's memory. Beam keeps a reference to the last shared
        # object; a new object releases the encoders.
        Shared().acquire(_Placeholder)
        if "torch" in sys.modules:  # otherwise this process has encoded nothing
            from runtimes.torch.device import free_memory

            free_memory()
    encoded = [shard for shard in shards if shard is not None]
    if len(encoded) < len(shards):
        raise RuntimeError("encode: the pipeline ended without committing every shard")
    watch.show_end(sum((Counter(shard.meta["bad_reasons"]) for shard in encoded), Counter()))
    return encoded
