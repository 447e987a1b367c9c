"""The shards of a stage, computed by the hosts of a cluster while the flow opens no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from artifacts.lock import held_claim
from artifacts.store import Store
from tasks.code_version import versions_of_shards
from tasks.devices.host_shards import ShardsJob
from tasks.devices.processes import Plan, written_plan
from tasks.devices.shards import Committer, ShardTask
from tasks.hosts.attempts import HostsJob, run_hosts_job
from tasks.hosts.choose import Hosts


def commit_on_hosts(
    hosts: Hosts,
    tasks: Sequence[ShardTask],
    store: Store,
    committer: Committer,
    plan: Plan,
    processes: int | None,
) -> None:
    """Return once the store has all shards of the tasks.

    Args:
        plan: with copies of its models in the store.
        processes: of each host, see devices_of.

    Raises: as `run_hosts_job`.
    """
    job = ShardsJob(
        committer,
        written_plan(plan),
        processes,
        tuple(tasks),
        versions_of_shards(plan.runtime),
        held_claim(),
    )
    keys = [task.key for task in tasks]
    work = store.url_of(committer.reports.removeprefix(f"{store.root}/").rpartition("/")[0])
    run_hosts_job(
        hosts.engine(work, store),
        HostsJob(
            work,
            asdict(job),
            together=False,
            any_ends=True,
            kept="shard",
            count=partial(_count, store, plan.stage, keys),
        ),
        lambda event: None,
        agents=hosts.agents,
        cluster=hosts.cluster,
    )


def _count(store: Store, stage: str, keys: Sequence[str]) -> int:
    """How many shards the store has."""
    return sum(shard is not None for shard in store.committed_shards(stage, keys))
