"""Shards that models compute from image shards, committed one by one by whoever makes them.

Beam's workers and the hosts of a cluster commit shards alike. This module does not import Beam.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from artifacts.store import Shard, Store
from tasks.beam.workers import shard_counts, worker_report
from tasks.devices.processes import DevicePool


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


class Busy(Exception):
    """Another process makes the shards."""


@dataclass(frozen=True)
class Committer:
    """Commits the shards of a task, unless the store has them intact.

    The facts of a task's first shard have `bad_reasons`, {reason: samples without a result}.

    Attributes:
        store_url: URL of the store.
        stage: name of the stage.
        reports: folder of the workers' reports.
        run: unique id of this run, for the reports.
    """

    store_url: str
    stage: str
    reports: str
    run: str

    def commit(self, task: ShardTask, pool: Callable[[], DevicePool], *, waits: bool) -> None:
        """Return once all shards of a task are committed.

        Args:
            pool: opens the models, if shards are to be computed.
            waits: whether it waits for shards that others make. Otherwise it raises Busy.

        Raises:
            Busy: another process makes them.
            Refused, Damaged, Failed, ProcessLost: as `DevicePool.compute`.
        """
        store = Store(self.store_url)
        shards = self.intact(store, task) or self._built(store, task, pool, waits=waits)
        self.report(task, shards)

    def intact(self, store: Store, task: ShardTask) -> list[Shard]:
        """All shards of a task, or none."""
        shards = [store.shard(self.stage, key) for key in task.keys]
        committed = [shard for shard in shards if shard is not None]
        return committed if len(committed) == len(shards) else []

    def report(self, task: ShardTask, shards: list[Shard]) -> None:
        """Count a task's shards in the report of this process."""
        written = sum(entry.size for shard in shards for entry in shard.files)
        failed = shards[0].meta["bad_reasons"]
        is_new = any(shard.is_new for shard in shards)
        counts = shard_counts(task.samples, failed, written, is_new=is_new)
        worker_report(self.store_url, self.reports, self.run).add(task.key, counts)

    def _built(
        self, store: Store, task: ShardTask, pool: Callable[[], DevicePool], *, waits: bool
    ) -> list[Shard]:
        """The shards, made here, or by another process during the wait."""
        stage = self.stage

        def on_wait(owner: dict[str, Any]) -> None:
            if not waits:
                raise Busy

        with store.shard_lock(stage, task.key, on_wait):
            if shards := self.intact(store, task):
                return shards
            with tempfile.TemporaryDirectory(prefix=f"kiln-{stage}-") as folder:
                facts = pool().compute(task.request, folder)
                files: dict[str, dict[str, str]] = {key: {} for key in facts}
                for name in sorted(os.listdir(folder)):
                    key, dot, suffix = name.partition(".")
                    files[key][dot + suffix] = f"{folder}/{name}"
                made = {
                    key: store.commit_shard(stage, key, files[key], facts[key]) for key in facts
                }
            return [made[key] for key in task.keys]
