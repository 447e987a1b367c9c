"""A host's share of a stage's shards, on the devices of the host.

    python -P -m tasks.devices.host_shards JOB.json

Each host commits the shards that nobody else makes, and then waits for those of the others: if one
host has ended well, the store has all shards. Hosts begin at different places of the list, so that
they seldom ask for the same lock. A lost host's locks expire, and another host makes its shards.
The agent of the host (runtimes/process/host_agent.py) passes on the events; they and the exit codes
are those of `python -P -m runtimes`.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from artifacts.lock import Claim
from artifacts.store import Store
from configs.errors import Refused
from runtimes.detect_hardware import collect_garbage_rarely, raise_open_file_limit
from runtimes.process import launcher
from runtimes.process.errors import report_error, warnings_to
from runtimes.process.job import Events
from tasks.beam.workers import worker_report
from tasks.build_or_reuse import storing
from tasks.code_version import versions_of_shards
from tasks.devices.processes import SHARDS_PER_DEVICE, DevicePool, devices, read_plan
from tasks.devices.shards import Busy, Committer, ShardTask


@dataclass(frozen=True)
class ShardsJob:
    """The shards of a stage, and what computes and commits them."""

    committer: Committer
    plan: dict[str, Any]  # as written_plan
    processes: int | None  # of each host, see devices_of
    tasks: tuple[ShardTask, ...]
    versions: dict[str, str]  # of the flow, see versions_of_shards
    claim: Claim | None  # of the lock under which the flow builds
    kind: str = "shards"


class HostShards:
    """The work of one host.

    Args:
        number: of this host, from 0.
        count: of the hosts.
    """

    def __init__(self, job: ShardsJob, number: int, count: int) -> None:
        self._job = job
        self._plan = read_plan(job.plan)
        first = len(job.tasks) * number // count
        self._tasks = [*job.tasks[first:], *job.tasks[:first]]
        self._opening = threading.Lock()

    def run(self) -> None:
        """Return once the store has all shards.

        Raises:
            Refused: this host has other code or packages than the flow, or unusable devices.
            LockLost: another flow has taken over.
            Failed, Damaged, ProcessLost: a shard could not be made.
        """
        self._check_versions()
        left = self._commit(self._tasks, waits=False)
        self._commit(left, waits=True)
        committer = self._job.committer
        worker_report(committer.store_url, committer.reports, committer.run).flush()

    def _check_versions(self) -> None:
        here = versions_of_shards(self._plan.runtime)
        for name, version in self._job.versions.items():
            if here.get(name, version) != version:
                raise Refused(
                    f"{name} is {here[name]} on this host, and {version} where the flow runs: "
                    "install the same on both"
                )

    @cached_property
    def _pool(self) -> DevicePool:
        return DevicePool(self._plan.fetched(), self._job.processes)

    def _open(self) -> DevicePool:
        """The models, loaded when the first shard is to be computed."""
        with self._opening:
            return self._pool

    def _commit(self, tasks: Sequence[ShardTask], *, waits: bool) -> list[ShardTask]:
        """Commit the shards of tasks; those that others make are returned, unless it waits."""
        if not tasks:
            return []
        busy: list[ShardTask] = []
        count = SHARDS_PER_DEVICE * len(devices(self._plan, self._job.processes))
        threads = ThreadPoolExecutor(count)
        running = {threads.submit(self._commit_one, task, waits): task for task in tasks}
        try:
            for done in as_completed(running):
                try:
                    done.result()
                except Busy:
                    busy.append(running[done])
        finally:  # after an error, the process ends without the shards in progress
            threads.shutdown(wait=False, cancel_futures=True)
        return busy

    def _commit_one(self, task: ShardTask, waits: bool) -> None:
        store = Store(self._job.committer.store_url)
        with storing(store):
            if self._job.claim is not None:
                self._job.claim.check(store.fs)
            self._job.committer.commit(task, self._open, waits=waits)


def main(arguments: list[str]) -> int:
    """Run the command line `arguments` (without the program's name) and return the exit code."""
    collect_garbage_rarely()
    raise_open_file_limit()
    events = Events()
    launcher.Stop().listen()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    warnings_to(events)
    try:
        job = TypeAdapter(ShardsJob).validate_python(json.loads(Path(arguments[0]).read_bytes()))
        hosts = launcher.Hosts.here()
        HostShards(job, hosts.number, hosts.count).run()
    except Exception as error:
        return report_error(events, error)
    events.emit("result")
    return 0


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except SystemExit as stopped:  # by a signal: shards in progress are made again
        code = stopped.code if isinstance(stopped.code, int) else 1
    launcher.leave(code)
