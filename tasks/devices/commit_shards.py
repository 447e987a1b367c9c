"""The Beam pipeline of a stage that computes shards on devices: one element per image shard."""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import apache_beam as beam
from apache_beam.utils.shared import Shared

from artifacts.records import Damaged
from artifacts.store import Shard, Store
from tasks.beam.pipeline import ShardProgress, run_linear
from tasks.beam.workers import WorkerReports, Workers, shard_counts, worker_report, workers_of
from tasks.child_process import ProcessLost
from tasks.devices.processes import SHARDS_PER_DEVICE, DevicePool, Plan, devices


@dataclass(frozen=True)
class ShardTask:
    """One image shard of which shards are made.

    The worker may make further shards with them, as the thumbnails of an image shard.
    """

    keys: tuple[str, ...]  # of the shards; the first one is locked while they are made
    request: dict[str, Any]  # for the worker
    samples: int

    @property
    def key(self) -> str:
        return self.keys[0]


class CommitShards(beam.DoFn):
    """Commits the shards of each element, unless the store has them intact.

    The facts of an element's first shard have `bad_reasons`, {reason: samples without a result}.

    Args:
        store_url: URL of the store.
        reports: folder of the workers' reports.
        plan: models and settings.
        processes: processes per machine, see devices_of.
        waits: whether it waits for shards that others make; otherwise it leaves them out.
    """

    def __init__(
        self,
        store_url: str,
        reports: str,
        plan: Plan,
        processes: int | None = None,
        waits: bool = True,
    ) -> None:
        self.store_url = store_url
        self.reports = reports
        self.plan = plan
        self.processes = processes
        self.waits = waits
        self.run = uuid4().hex
        self._shared = Shared()

    def process(self, task: ShardTask) -> Iterator[str]:
        """Yield the first shard's key once all are committed."""
        store = Store(self.store_url)
        try:
            shards = self._committed(store, task) or self._built(store, task)
        except _Busy:
            return
        written = sum(entry.size for shard in shards for entry in shard.files)
        failed = shards[0].meta["bad_reasons"]
        is_new = any(shard.is_new for shard in shards)
        counts = shard_counts(task.samples, failed, written, is_new=is_new)
        worker_report(self.store_url, self.reports, self.run).add(task.key, counts)
        yield task.key

    def _committed(self, store: Store, task: ShardTask) -> list[Shard]:
        """All shards of an element, or none."""
        shards = [store.shard(self.plan.stage, key) for key in task.keys]
        committed = [shard for shard in shards if shard is not None]
        return committed if len(committed) == len(shards) else []

    def _built(self, store: Store, task: ShardTask) -> list[Shard]:
        """The shards, made here, or by another process during the wait. Raises _Busy."""
        stage = self.plan.stage
        with store.shard_lock(stage, task.key, self._wait):
            if shards := self._committed(store, task):
                return shards
            with tempfile.TemporaryDirectory(prefix=f"kiln-{stage}-") as folder:
                facts = self.open().compute(task.request, folder)
                files: dict[str, dict[str, str]] = {key: {} for key in facts}
                for name in sorted(os.listdir(folder)):
                    key, dot, suffix = name.partition(".")
                    files[key][dot + suffix] = f"{folder}/{name}"
                made = {
                    key: store.commit_shard(stage, key, files[key], facts[key]) for key in facts
                }
            return [made[key] for key in task.keys]

    def _wait(self, owner: dict[str, Any]) -> None:
        if not self.waits:
            raise _Busy

    def open(self, make: Callable[[], DevicePool] | None = None) -> DevicePool:
        """The models of this process, loaded at the first call and kept while they are in use."""
        pool: DevicePool = self._shared.acquire(make or self._loaded)
        return pool

    def _loaded(self) -> DevicePool:
        Shared().acquire(_Placeholder)  # which releases those of the last run
        return DevicePool(self.plan.fetched(), self.processes)


class _Busy(Exception):
    """Another process makes the shards."""


class _Placeholder:
    """Replaces the models in Beam's cache of shared objects."""


def commit_shards(
    tasks: Sequence[ShardTask],
    store: Store,
    dofn: CommitShards,
    options: dict[str, Any],
    progress: Callable[[int, int, str], None],
) -> list[Shard]:
    """Commit the shards of every task, and return them in the order of `tasks` and their keys.

    Several flows may call it for the same shards: each makes those that nobody else does.

    Raises Refused; Damaged if an image shard differs from the committed shard; LockLost.
    """
    plan = dofn.plan
    sizes = {task.key: task.samples for task in tasks}
    watch = ShardProgress(store, dofn.reports, sizes, progress, unit="pictures")
    reports = WorkerReports(store, dofn.reports)
    reports.clear()  # of an earlier run
    is_here = workers_of(options) is Workers.THREADS
    count = len(devices(plan, dofn.processes)) if is_here else 1

    def run(some: Sequence[ShardTask], *, waits: bool) -> None:
        dofn.waits = waits
        known = (Damaged, ProcessLost)
        threads = count * SHARDS_PER_DEVICE
        run_linear(some, dofn, options, watch, threads=threads, known=known)

    def committed() -> dict[str, Shard]:
        keys = [key for task in tasks for key in task.keys]
        shards = zip(keys, store.committed_shards(plan.stage, keys), strict=True)
        return {key: shard for key, shard in shards if shard is not None}

    try:
        run(tasks, waits=False)
        shards = committed()
        if missing := [task for task in tasks if not shards.keys() >= {*task.keys}]:
            others = worker_report(store.url, dofn.reports, dofn.run)
            for key in sizes.keys() - {task.key for task in missing}:
                others.add(key, {})  # also those of other flows, which no report here has
            run(missing, waits=True)
            shards = committed()
    finally:
        reports.clear()
        # The next stages need the device's memory. Beam keeps a reference to the last shared
        # object; a new object releases the models.
        Shared().acquire(_Placeholder)
        if "torch" in sys.modules:  # otherwise this process has loaded no model
            from runtimes.torch.device import free_memory

            free_memory()
    if any(key not in shards for task in tasks for key in task.keys):
        raise RuntimeError(f"{plan.stage}: the pipeline ended without committing every shard")
    watch.show_end(sum((Counter(shards[t.key].meta["bad_reasons"]) for t in tasks), Counter()))
    return [shards[key] for task in tasks for key in task.keys]
