"""The best checkpoint and the early stop of several processes: one choice, whoever is killed."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import MakeJob, outputs
from kiln_command import jobs_of
from safetensors.numpy import load_file
from training import history

from runtimes.process.job import Events, TrainJob
from runtimes.process.launcher import Stop
from runtimes.train.checkpoints import Checkpoints
from runtimes.train.training_loop import train

StartJob = Any  # of conftest.py: starts a Child
WEIGHTS = "unet/diffusion_pytorch_model.safetensors"
#: A rising learning rate: the weights improve, then get worse.
SETTINGS: dict[str, Any] = {
    "steps": 40,
    "logging_steps": 1,
    "checkpointing_steps": 2,
    "checkpoints_total_limit": 1,
    "holdout_loss": {"every_n_steps": 2, "samples": 4, "draws": 2},
    "best_checkpoint": {"patience": 2},
    "learning_rate": 0.1,
    "lr_warmup_steps": 20,
}


def run(start_job: StartJob, job: TrainJob) -> dict[str, Any]:
    """The result of a run to its end; a hang fails by the child's deadline."""
    child = start_job(job)
    (result,) = [event for event in child.events() if event["event"] == "result"]
    assert child.end() == 0
    return dict(result)


def best(job: TrainJob) -> int:
    """The step with the lowest held-out loss of a run's history."""
    lines = [line for line in history(job) if "validation_loss" in line]
    losses = {line["step"]: line["validation_loss"] for line in lines}
    return min(losses, key=lambda step: losses[step])


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize(
    "fsdp", [pytest.param(1, id="data"), pytest.param("all", id="fsdp", marks=pytest.mark.soak)]
)
def test_two_processes_stop_early_and_publish_what_one_does(
    make_job: MakeJob, start_job: StartJob, fsdp: Any
) -> None:
    one, two = make_job("one", **SETTINGS), make_job("two", **SETTINGS, processes=2, fsdp=fsdp)
    assert train(one, Events(), Stop())
    result = run(start_job, two)
    chosen = best(one)
    assert 2 < chosen < 36 and result["chosen_step"] == best(two) == chosen
    assert result["stopped_early"] and result["step"] == chosen + 4
    kept = sorted(path.name for path in Path(two.work, "checkpoints").iterdir())
    assert kept == [f"step-{step:08d}" for step in (chosen, chosen + 4)]
    state = Checkpoints(two.work, 9).read(chosen).state["weights"]
    for name, array in load_file(Path(two.out, WEIGHTS)).items():
        np.testing.assert_array_equal(array, state[f"unet.{name}"][...], err_msg=name)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("fsdp", [1, "all"])
def test_a_killed_run_of_two_processes_chooses_the_same_checkpoint(
    make_job: MakeJob, start_job: StartJob, fsdp: Any
) -> None:
    """Killed before the best, after it, and while the stop is decided."""
    whole = make_job("whole", **SETTINGS, processes=2, fsdp=fsdp)
    result = run(start_job, whole)
    job = make_job("parts", **SETTINGS, processes=2, fsdp=fsdp)
    stop = result["step"]
    ends = [("progress", best(whole) - 1), ("checkpoint", stop - 2), ("validation", stop)]
    for number, (event, step) in enumerate(ends):
        child = start_job(job)
        assert any(e["event"] == event and e["step"] == step for e in child.events())
        if number % 2:
            child.process.kill()
            child.process.wait()
            continue
        for pid in jobs_of(child.process.pid):
            os.kill(pid, signal.SIGKILL)
        assert child.end() != 0
    again = run(start_job, job)
    same = ("step", "chosen_step", "chosen_because", "stopped_early")
    assert {name: again[name] for name in same} == {name: result[name] for name in same}
    assert outputs(job) == outputs(whole)


@pytest.mark.slow
@pytest.mark.soak
def test_a_stop_request_of_one_process_at_the_early_stop_ends_both(
    make_job: MakeJob, start_job: StartJob
) -> None:
    whole = make_job("whole", **SETTINGS, processes=2)
    result = run(start_job, whole)
    job = make_job("parts", **SETTINGS, processes=2)
    child = start_job(job)
    event = ("validation", result["step"])
    assert any((e["event"], e.get("step")) == event for e in child.events())
    (second,) = jobs_of(child.process.pid)
    os.kill(second, signal.SIGTERM)
    assert child.end() in (0, 143), "finished, or stopped with a checkpoint"
    if not Path(job.out, WEIGHTS).exists():
        assert run(start_job, job)["chosen_step"] == result["chosen_step"]
    assert outputs(job) == outputs(whole)
