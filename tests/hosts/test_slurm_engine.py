"""The engine Slurm on a real cluster of two nodes, with agents that say what a test needs."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import SlurmCluster, slurm_cluster
from waiting import wait_until

from configs.errors import Away, Refused
from configs.settings.clusters import Slurm
from tasks.child_process import JobStopped
from tasks.hosts import slurm as slurm_engine
from tasks.hosts.engine import Agents
from tasks.hosts.slurm import SlurmEngine, check

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]

#: An agent as a shell script: it tells its variables, and that it lives, until SIGTERM.
AGENT = """#!/bin/bash
while [ "$1" != --host ]; do shift; done
host=$2
say() { echo "{\\"host\\": $host, \\"event\\": \\"$1\\"}"; }
trap 'say stopped; exit 143' TERM
env > "$0.$host"
say host
while true; do say alive; sleep 0.1; done
"""
MakeEngine = Callable[..., SlurmEngine]


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    with slurm_cluster(slurmd_timeout=5) as cluster:
        yield cluster


@pytest.fixture
def make(
    slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[MakeEngine]:
    """`make(**settings)` is an engine of one training; its jobs are cancelled at the end."""
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "agent").write_text(AGENT)
    (tmp_path / "agent").chmod(0o755)

    def engine(**settings: Any) -> SlurmEngine:
        return SlurmEngine(Slurm(**settings), 2, "a-training", tmp_path / "output")

    yield engine
    slurm.run("scancel", "--user=root")
    wait_until(lambda: not slurm.jobs())


def agents(folder: Path) -> Agents:
    return Agents(2, str(folder / "job.json"), 5.0, str(folder / "agent"))


def read(engine: SlurmEngine, event: str, hosts: int = 2) -> None:
    """Read lines until every host has told an event."""
    found: set[int] = set()
    until = time.monotonic() + 30
    while len(found) < hosts:
        assert time.monotonic() < until, f"{found} told {event}"
        for line in engine.read(1.0) or ():
            said = json.loads(line) if line.startswith("{") else {}
            if said.get("event") == event:
                found.add(said["host"])


def test_agents_run_on_both_hosts_without_secrets_and_stop(
    make: MakeEngine, slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    monkeypatch.setenv("AWS_PROFILE", "a-profile")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".bash_profile").write_text('module() { export MODULE="$2 of $SLURM_NODEID"; }\n')
    engine = make(environment=["AWS_PROFILE"], setup=["module load cuda"])
    assert engine.reserve()
    engine.start(agents(tmp_path))
    read(engine, "host")
    nodes = set()
    for host in ("0", "1"):
        lines = (tmp_path / f"agent.{host}").read_text().splitlines()
        assert {"AWS_PROFILE=a-profile", f"MODULE=cuda of {host}"} <= set(lines)
        assert not [line for line in lines if "a-secret" in line]
        nodes |= {line for line in lines if line.startswith("SLURMD_NODENAME=")}
        assert [line for line in lines if line.startswith("KILN_ADDRESS=127.0.0.1:")]
    assert len(nodes) == 2
    assert "a-secret" not in slurm.run("scontrol", "show", "job", *slurm.jobs())
    assert engine.lost() is None
    engine.stop()
    read(engine, "stopped")
    wait_until(lambda: engine.read(0.1) is None)
    engine.end()
    assert slurm.jobs() == [] and list(engine.folder.iterdir()) == []


def test_a_setup_that_fails_starts_no_agent(make: MakeEngine, tmp_path: Path) -> None:
    engine = make(setup=["no-such-command"])
    engine.start(agents(tmp_path))
    said = list[str]()
    wait_until(lambda: (lines := engine.read(0.3)) is None or said.extend(lines))
    assert [line for line in said if "no-such-command: command not found" in line]
    assert not list(tmp_path.glob("agent.*"))


def test_a_controller_that_is_away_ends_no_job(
    make: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    engine = make()
    engine.start(agents(tmp_path))
    read(engine, "host")
    monkeypatch.setattr(slurm_engine, "STATE_SECONDS", 0.0)
    with monkeypatch.context() as outage:
        outage.setenv("SLURM_CONF", str(tmp_path / "missing"))
        outage.setattr(slurm_engine, "COMMAND_SECONDS", 1.0)  # squeue asks name servers for long
        wait_until(lambda: engine.read(0.3) is None or "the job runs on" in caplog.text)
        read(engine, "alive")
    engine.kill()
    wait_until(lambda: engine.read(0.1) is None)


def test_a_killed_attempt_leaves_no_process(
    make: MakeEngine, slurm: SlurmCluster, tmp_path: Path
) -> None:
    daemons = {name: slurm.processes(name) for name in ("n1", "n2")}
    engine = make()
    engine.start(agents(tmp_path))
    read(engine, "host")
    engine.kill()
    assert slurm.jobs() == []
    assert {name: slurm.processes(name) for name in daemons} == daemons
    wait_until(lambda: engine.read(0.1) is None)


def test_a_job_that_an_earlier_flow_left_is_removed(
    make: MakeEngine, slurm: SlurmCluster, tmp_path: Path
) -> None:
    engine = make()
    engine.start(agents(tmp_path))
    others = slurm.run("sbatch", "--parsable", "--output=/dev/null", text="#!/bin/sh\nsleep 60")
    assert make().reserve()
    assert slurm.jobs() == [others]


def test_a_job_that_a_person_cancels_is_not_repeated(
    make: MakeEngine, slurm: SlurmCluster, tmp_path: Path
) -> None:
    engine = make()
    engine.start(agents(tmp_path))
    read(engine, "host")
    slurm.run("scancel", *slurm.jobs())
    wait_until(lambda: engine.read(0.1) is None)
    with pytest.raises(JobStopped, match="was cancelled"):
        engine.lost()


def test_a_host_that_is_marked_down_is_a_lost_one(
    make: MakeEngine, slurm: SlurmCluster, tmp_path: Path
) -> None:
    engine = make()
    engine.start(agents(tmp_path))
    read(engine, "host")
    slurm.run("scontrol", "update", "nodename=n2", "state=down", "reason=its fan")
    wait_until(lambda: engine.read(0.1) is None)
    why = engine.lost()
    slurm.start("n2")
    assert why is not None and "NODE_FAIL" in why, why


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"partition": "missing"}, "invalid partition"),
        ({"constraint": "h100"}, "feature"),
        ({"gpus_per_node": "8"}, "GRES|gres|Gres"),
    ],
)
def test_what_the_cluster_can_never_run_is_refused(
    make: MakeEngine, settings: dict[str, Any], why: str
) -> None:
    make()
    with pytest.raises(Refused, match=rf"(?i){why}"):
        check(Slurm(**settings), 2)


def test_more_hosts_than_the_cluster_has_are_refused(make: MakeEngine) -> None:
    check(make().settings, 2)
    with pytest.raises(Refused, match="sbatch refuses the job"):
        check(Slurm(), 3)


def test_a_job_that_waits_for_ever_is_refused_and_removed(
    make: MakeEngine, slurm: SlurmCluster, tmp_path: Path
) -> None:
    engine = make(partition="short", time_limit="10")
    with pytest.raises(Refused, match="never starts"):
        engine.start(agents(tmp_path))
    assert slurm.jobs() == []


def test_with_a_host_down_the_request_may_pass_later(make: MakeEngine, slurm: SlurmCluster) -> None:
    settings = make().settings
    slurm.kill("n2")
    slurm.run("scontrol", "update", "nodename=n2", "state=down", "reason=its fan")
    with pytest.raises(Away, match="n2 is down"):
        check(settings, 2)
    slurm.start("n2")
    check(settings, 2)
