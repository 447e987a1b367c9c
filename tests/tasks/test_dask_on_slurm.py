"""Download and encode on a Dask cluster of Slurm jobs, of which one is cancelled."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from download_stage import build
from engine_stages import content, encoded, make_recipe
from engines import wait_for
from kill_training import halt_at
from kiln_command import ROOT
from loopback_server import free_port
from slurm_cluster import SlurmCluster, slurm_cluster
from waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("engines")]

SECONDS = 300  # for a busy machine
SECRET = "KILN_TEST_SECRET"  # a variable where the cluster is started


@contextmanager
def dask_on_slurm(slurm: SlurmCluster, folder: Path, env: Mapping[str, str]) -> Iterator[str]:
    """The address of a cluster of two jobs, as deploy/slurm/dask_cluster.py makes it."""
    port = free_port()
    words = ["--jobs=2", "--memory=8GB", "--host=127.0.0.1", f"--port={port}"]
    words += [f"--logs={folder}/logs", *(f"--environment={name}" for name in env)]
    with (folder / "cluster.log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, ROOT / "deploy/slurm/dask_cluster.py", *words],
            env={**os.environ, "PYTHONPATH": str(ROOT), **slurm.environment, **env, SECRET: "1"},
            cwd=folder,
            stdout=log,
            stderr=log,
        )
    try:
        address = f"tcp://127.0.0.1:{port}"
        wait_for(address)
        yield address
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
        assert slurm.jobs() == []
        printed = (folder / "cluster.log").read_text()
        assert printed == f"-o beam.runner=DaskRunner -o beam.dask_client_address={address}\n"
    finally:
        child.kill()
        child.wait()


def cancel_when_told(slurm: SlurmCluster, told: Path) -> threading.Thread:
    """Cancel the Slurm job of the process that writes its pid to `told`, in a thread."""

    def cancel() -> None:
        wait_until(told.exists, SECONDS)
        variables = Path(f"/proc/{told.read_text()}/environ").read_bytes().split(b"\0")
        (job,) = [one.partition(b"=")[2] for one in variables if one.startswith(b"SLURM_JOB_ID=")]
        slurm.run("scancel", job.decode())

    thread = threading.Thread(target=cancel, daemon=True)
    thread.start()
    return thread


def workers_environments(slurm: SlurmCluster) -> list[Path]:
    """Files in /proc with the variables of the workers."""
    found = []
    for process in [*slurm.processes("n1"), *slurm.processes("n2")]:
        folder = Path(f"/proc/{process}")
        if b"dask_worker" in (folder / "cmdline").read_bytes():
            found.append(folder / "environ")
    return found


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param("download", marks=pytest.mark.extended),
        pytest.param("encode", marks=pytest.mark.soak),
    ],
)
def test_a_cancelled_job_changes_nothing_and_is_replaced(
    tmp_path: Path, tiny_sdxl: Path, stage: str
) -> None:
    recipe = make_recipe(tmp_path, "alone", tiny_sdxl, {})
    images = build(recipe)
    undisturbed = content(images), content(encoded(recipe, images))
    told = tmp_path / "told"
    # A worker is given up 1 s after it is gone, instead of 15 s.
    env = {"DASK_DISTRIBUTED__DEPLOY__LOST_WORKER_TIMEOUT": "1s"}
    env |= halt_at(rf"/{stage}/shards/.*\.json$", 2, told)
    with slurm_cluster() as slurm, dask_on_slurm(slurm, tmp_path, env) as address:
        beam = {"runner": "DaskRunner", "dask_client_address": address}
        recipe = make_recipe(tmp_path, "store", tiny_sdxl, beam)
        cancelling = cancel_when_told(slurm, told)
        images = build(recipe)
        latents = encoded(recipe, images)
        cancelling.join(0)
        assert not cancelling.is_alive(), "no job was cancelled"
        wait_until(lambda: len(slurm.jobs()) == 2, SECONDS)
        sent = [path.read_bytes() for path in workers_environments(slurm)]
        assert sent and not [variables for variables in sent if SECRET.encode() in variables]
    assert (content(images), content(latents)) == undisturbed
