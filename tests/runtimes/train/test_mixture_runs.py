"""A mixture's run is the same however often it is killed, on any number of processes."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import chips
import pytest
from jobs import MakeJob
from kiln_command import jobs_of
from tolerances import LOSS
from training import RecordedEvents, history, losses, train
from waiting import wait_until

from runtimes.process.job import TrainJob
from runtimes.train.checkpoints import Checkpoints

StartJob = Callable[..., Any]  # of conftest.py: a Child
WriteMixture = Callable[..., str]
FACTS = {"repeats": None, "loss_weight": 1.0, "caption_dropout_rate": None, "regularisation": None}
MIXTURE: dict[str, dict[str, Any]] = {
    "subject": {**FACTS, "weight": 0.3, "caption_dropout_rate": 0.5},
    "style": {**FACTS, "weight": None, "repeats": 2.5},
    "classes": {**FACTS, "weight": None, "regularisation": "images", "loss_weight": 0.5},
}
SHARDS = {
    "subject": [{"train/8x8": 50, "train/4x12": 10}],
    "style": [{"train/8x8": 200, "train/4x12": 100}] * 2,
    "classes": [{"train/8x8": 1000}] * 6,
}


@pytest.mark.soak
@pytest.mark.slow
def test_killed_at_random_it_goes_on_with_other_processes_and_on_another_runtime(
    make_job: MakeJob, start_job: StartJob, write_mixture: WriteMixture, chance: random.Random
) -> None:
    """The rate is so small that a step's loss tells its samples, in their order, alone."""
    settings = {
        **{"global_batch_size": 8, "learning_rate": 1e-30, "caption_dropout_rate": 0.1},
        **{"steps": 90, "checkpointing_steps": 3, "logging_steps": 1},
    }
    data = {"latents": write_mixture(SHARDS), "mixture": MIXTURE}
    whole = make_job("whole", **data, **settings)
    train(whole)
    expected = losses(whole)
    assert len(set(expected)) == 90

    def killed(**more: Any) -> TrainJob:
        job = make_job("parts", **data, **{**settings, **more})
        saved = Checkpoints(job.work, 9).latest()
        child = start_job(job)
        until = (saved.step if saved else 0) + chance.randint(2, 6)
        while child.step_of_first("progress") < until:
            pass
        ranks = jobs_of(child.process.pid)
        child.process.kill()
        child.end()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), 20)
        return job

    for processes in (1, 2, 4):
        job = killed(processes=processes)
    with chips.standing_in("jax"):
        child = start_job(replace(job, runtime="jax", train={**job.train, "processes": 1}))
        assert 0 < child.step_of_first("start") < 90
        assert child.end() == 0
    assert losses(job) == pytest.approx(expected, rel=LOSS)


@pytest.mark.slow
def test_history_and_events_have_the_held_out_loss_of_each_source(
    make_job: MakeJob, write_mixture: WriteMixture
) -> None:
    shards = {
        name: [{**groups, "holdout/8x8": 2 + number} for groups in SHARDS[name][:1]]
        for number, name in enumerate(sorted(SHARDS))
    }
    job = make_job(
        **{"latents": write_mixture(shards), "mixture": MIXTURE, "steps": 2},
        holdout_loss={"every_n_steps": 2},
    )
    events = RecordedEvents()
    train(job, events)
    *_, last = history(job)
    by_source = {name: last[f"validation_loss/{name}"] for name in shards}
    (told,) = events.of("validation")
    assert told["by_source"] == by_source
    sizes = {name: shards[name][0]["holdout/8x8"] for name in shards if name != "classes"}
    mean = sum(sizes[name] * by_source[name] for name in sizes) / sum(sizes.values())
    assert last["validation_loss"] == pytest.approx(mean)
