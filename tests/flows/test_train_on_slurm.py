"""Training on the two hosts of a real Slurm, whose hosts fail, freeze and stop for a time limit."""

import json
import logging
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import chips
import published as checks
import pytest
from kiln_command import ROOT, command, environment, run_json
from prefect_server import Server
from slurm_cluster import SlurmCluster, slurm_cluster
from two_hosts import (
    LONGER,
    SECONDS,
    WEIGHTS,
    Overrides,
    Run,
    cancel_in_training,
    checkpoints,
    weights_of,
)
from waiting import wait_until

from configs.load_recipe import load_recipe
from runtimes import registry

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]

ON_TWO: Overrides = {"train.hosts": 2, "slurm": {"silence_seconds": 10}}
#: Seconds from a host's loss until the next job is submitted: for its silence, for the others'
#: errors or their kill, and for commands of Slurm.
KNOWN_SECONDS = 45


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    with slurm_cluster() as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def on_slurm(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)


def submitted(caplog: pytest.LogCaptureFixture) -> int:
    """Number of the lines that tell of a job."""
    return sum("is submitted" in record.getMessage() for record in caplog.records)


def test_a_run_on_two_hosts_publishes_the_model_of_two_processes(
    small: Overrides, run_here: Callable[..., checks.Report], train_longer: Run, slurm: SlurmCluster
) -> None:
    report = run_here("digits", {**small, "train.hosts": 2})
    checks.assert_published(report, "torch", 6)
    run = json.loads((checks.folder(report, "train") / "manifest.json").read_bytes())["run"]
    assert (run["cluster"], run["hosts"], run["processes"]) == ("slurm", 2, 1)
    steps = {"train.steps": 6, "train.checkpointing_steps": 2, "train.processes": 2}
    here = train_longer("here", steps)
    assert weights_of(report) == (here / WEIGHTS).read_bytes()
    assert slurm.jobs() == []
    assert not list(Path(small["store"], "slurm").iterdir())


@pytest.mark.extended
@pytest.mark.parametrize("loss", ["kill", "freeze"])
def test_a_lost_host_is_known_and_training_goes_on_to_the_same_weights(
    tmp_path: Path,
    slurm: SlurmCluster,
    train_longer: Run,
    undisturbed: bytes,
    caplog: pytest.LogCaptureFixture,
    loss: str,
) -> None:
    caplog.set_level(logging.INFO, "kiln")
    store = tmp_path / "lost"
    with ThreadPoolExecutor(1) as thread:
        training = thread.submit(train_longer, "lost", ON_TWO)
        wait_until(lambda: checkpoints(store) or training.done(), SECONDS)
        getattr(slurm, loss)("n2")
        lost = time.time()
        wait_until(lambda: "goes on" in caplog.text or training.done(), SECONDS)
        known = time.time()
        slurm.start("n2")
        trained = training.result(SECONDS)
    assert known - lost < KNOWN_SECONDS
    assert (trained / WEIGHTS).read_bytes() == undisturbed
    assert submitted(caplog) == 2
    (why,) = [one.getMessage() for one in caplog.records if "goes on" in one.getMessage()]
    assert "host 1" in why
    assert slurm.jobs() == []


@pytest.mark.extended
@pytest.mark.parametrize("runtime", ["jax", "mindspore"])
def test_other_runtimes_publish_the_model_of_two_processes(
    small: Overrides,
    run_here: Callable[..., checks.Report],
    tiny_model: Callable[[str], Path],
    tiny_clip: Path,
    tmp_path: Path,
    runtime: str,
) -> None:
    overrides = {
        **small,
        "runtime": runtime,
        "model.path": str(tiny_model("least-sdxl")),
        "evaluate.clip": str(tiny_clip),
        "evaluate.judges": [],
        "train.sample_every_n_steps": 0,
    }
    with chips.standing_in(runtime):
        registry._query.cache_clear()  # its answers may be of a test without these stand-ins
        report = run_here("digits", {**overrides, "train.hosts": 2})
        recipe = load_recipe("digits", {**overrides, "train.processes": 2})
        here = checks.train_apart(recipe, report, tmp_path / "here")
    checks.assert_published(report, runtime, 6)
    registry._query.cache_clear()
    assert weights_of(report) == (here / WEIGHTS).read_bytes()


@pytest.mark.extended
def test_at_the_time_limit_of_its_jobs_training_goes_on_in_the_next(
    tmp_path: Path,
    slurm: SlurmCluster,
    train_longer: Run,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slurm looks each 30 s which jobs are due: the signal comes 5 to 35 s after the start.

    A step takes the hosts at least 0.7 s, so that 60 steps take longer than that anywhere.
    """
    caplog.set_level(logging.INFO, "kiln")
    steps = {"train.steps": 60, "train.checkpointing_steps": 60}
    whole = train_longer("whole", {**steps, "train.processes": 2})
    (tmp_path / "sitecustomize.py").write_text(
        "import time\n"
        "from runtimes.train.divergence import DivergenceDetector as Detector\n"
        "observe = Detector.observe\n"
        "Detector.observe = lambda *about: (time.sleep(0.7), observe(*about))[1]\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    limit = {"time_limit": "1", "stop_before": 25, "environment": ["PYTHONPATH"]}
    trained = train_longer("limited", {**steps, "train.hosts": 2, "slurm": limit})
    assert submitted(caplog) > 1
    assert (trained / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()


@pytest.mark.extended
def test_a_cancelled_flow_leaves_a_checkpoint_and_no_job(
    tmp_path: Path,
    small: Overrides,
    api: str,
    slurm: SlurmCluster,
    run_here: Callable[..., checks.Report],
    undisturbed: bytes,
) -> None:
    overrides = {**small, **LONGER, **ON_TWO, "train.checkpointing_steps": 24}
    store = Path(small["store"])
    variables = {**environment(tmp_path, api), **slurm.environment}
    assert cancel_in_training(overrides, variables, tmp_path / "log") < KNOWN_SECONDS
    assert slurm.jobs() == []
    (saved,) = checkpoints(store)
    assert 0 < saved <= 24  # a busy machine stops it at the last step
    report = run_here("digits", overrides)
    assert checks.manifest(report, "train")["run"]["resumed_from"] == saved
    assert weights_of(report) == undisturbed


@pytest.mark.extended
def test_a_worker_of_a_pool_trains_on_two_hosts(
    tmp_path: Path, small: Overrides, api: str, slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flow's machine has no Slurm; the worker's submits the jobs."""
    overrides = {
        **small,
        "shared_folders": [str(tmp_path)],
        "place.train": "of-slurm",
        "train.hosts": 2,
    }
    monkeypatch.undo()  # of `on_slurm`
    (tmp_path / "pool").mkdir()
    pool = Server(tmp_path / "pool", api)
    pool.cli("work-pool", "create", "of-slurm", "--type", "process")
    placed = subprocess.run(
        command("place", "digits", overrides=overrides), env=pool.env, cwd=ROOT, timeout=SECONDS
    )
    assert placed.returncode == 0
    pool.env |= slurm.environment
    try:
        pool.start("worker", "worker", "start", "--pool", "of-slurm")
        report = run_json(tmp_path, "digits", overrides, api)
    finally:
        pool.stop()
    checks.assert_published(report, "torch", 6)
    assert slurm.jobs() == []
