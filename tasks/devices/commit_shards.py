"""The Beam pipeline of a stage that computes shards on devices: one element per image shard."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import apache_beam as beam
from apache_beam.utils.shared import Shared

from artifacts.filesystems import ask_at_once
from artifacts.records import Damaged
from artifacts.store import Shard, Store
from tasks.beam.pipeline import ShardProgress, run_linear, watching
from tasks.beam.workers import WorkerReports, Workers, worker_report, workers_of
from tasks.child_process import ProcessLost
from tasks.devices.processes import SHARDS_PER_DEVICE, DevicePool, Plan, devices
from tasks.devices.shards import Busy, Committer, ShardTask

if TYPE_CHECKING:
    from tasks.hosts.choose import Hosts


class CommitShards(beam.DoFn):
    """Commits the shards of each element, as `Committer`.

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

    @property
    def committer(self) -> Committer:
        """What commits the shards of an element."""
        return Committer(self.store_url, self.plan.stage, self.reports, self.run)

    def process(self, task: ShardTask) -> Iterator[str]:
        """Yield the first shard's key once all are committed."""
        try:
            self.committer.commit(task, self.open, waits=self.waits)
        except Busy:
            return
        yield task.key

    def open(self, make: Callable[[], DevicePool] | None = None) -> DevicePool:
        """The models of this process, loaded at the first call and kept while they are in use."""
        pool: DevicePool = self._shared.acquire(make or self._loaded)
        return pool

    def _loaded(self) -> DevicePool:
        Shared().acquire(_Placeholder)  # which releases those of the last run
        return DevicePool(self.plan.fetched(), self.processes)


class _Placeholder:
    """Replaces the models in Beam's cache of shared objects."""


def commit_shards(
    tasks: Sequence[ShardTask],
    store: Store,
    dofn: CommitShards,
    options: dict[str, Any],
    progress: Callable[[int, int, str], None],
    hosts: Hosts | None = None,
) -> list[Shard]:
    """Commit the shards of every task, and return them in the order of `tasks` and their keys.

    Several flows may call it for the same shards: each makes those that nobody else does.

    Args:
        hosts: of a cluster that compute, instead of Beam's workers.

    Raises:
        Refused, LockLost: as the workers do.
        Damaged: an image shard differs from the committed shard.
        Away, JobFailed: as `run_hosts_job`.
    """
    plan = dofn.plan
    sizes = {task.key: task.samples for task in tasks}
    watch = ShardProgress(store, dofn.reports, sizes, progress, unit="pictures")
    reports = WorkerReports(store, dofn.reports)
    reports.clear()  # of an earlier run
    is_here = workers_of(options) is Workers.THREADS
    count = len(devices(plan, dofn.processes)) if is_here and hosts is None else 1

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
        if hosts is None:
            run(tasks, waits=False)
        else:
            _commit_on_hosts(tasks, store, dofn, watch, hosts)
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


def _commit_on_hosts(
    tasks: Sequence[ShardTask], store: Store, dofn: CommitShards, watch: ShardProgress, hosts: Hosts
) -> None:
    """Let hosts make the shards that the store lacks; no model is opened here."""
    from tasks.hosts.shards_on_hosts import commit_on_hosts

    committer = dofn.committer
    missing: list[ShardTask] = []
    intact = ask_at_once(store.fs, partial(committer.intact, store), tasks)
    for task, shards in zip(tasks, intact, strict=True):
        if shards:
            committer.report(task, shards)
        else:
            missing.append(task)
    if missing:
        with watching(watch):
            commit_on_hosts(hosts, missing, store, committer, dofn.plan, dofn.processes)
