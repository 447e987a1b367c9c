"""The Slurm of the tests loses and regains a node, and leaves nothing."""

from pathlib import Path

import pytest
import slurm_cluster
from chips import MUST_RUN
from waiting import wait_until

ON_BOTH = ("srun", "--nodes=2", "--ntasks-per-node=1")


def test_without_slurm_a_test_is_skipped_or_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(slurm_cluster, "UNPACKED", tmp_path)
    monkeypatch.setattr(slurm_cluster, "_program", lambda name: "")
    monkeypatch.setenv(MUST_RUN, "torch")
    with pytest.raises(pytest.skip.Exception, match="make setup-slurm"):
        slurm_cluster.require_slurm()
    monkeypatch.setenv(MUST_RUN, "torch slurm")
    with pytest.raises(pytest.fail.Exception, match="slurm must run"):
        slurm_cluster.require_slurm()


@pytest.mark.slow
def test_a_killed_node_loses_its_steps_and_comes_back(tmp_path: Path) -> None:
    with slurm_cluster.slurm_cluster() as cluster:
        assert set(cluster.run(*ON_BOTH, "printenv", "SLURMD_NODENAME").split()) == {"n1", "n2"}
        cluster.run(
            "sbatch",
            "--nodes=2",
            f"--output={tmp_path}/log",
            text="#!/bin/sh\nsrun sh -c 'env --ignore-environment sleep 600 & sleep 600'",
        )
        # Each node: daemon, step daemon, shell and two sleeps; n1 has the script's four, too.
        sizes = {"n1": 9, "n2": 5}
        wait_until(lambda: {name: len(cluster.processes(name)) for name in sizes} == sizes)
        cluster.kill("n2")
        assert cluster.processes("n2") == []
        cluster.freeze("n1")
        states = {
            Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
            for process in cluster.processes("n1")
        }
        assert states == {"T"}
        cluster.start("n1")
        cluster.start("n2")
        cluster.run("scancel", *cluster.jobs())  # it is queued again
        wait_until(lambda: not cluster.jobs())
        assert set(cluster.run(*ON_BOTH, "printenv", "SLURMD_NODENAME").split()) == {"n1", "n2"}
    assert cluster.processes("n1") == cluster.processes("n2") == []
