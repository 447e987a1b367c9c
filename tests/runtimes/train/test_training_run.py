"""Beside the steps: checkpoints in background, validation, going back, curves; all resumable."""

import errno
import gzip
import itertools
import json
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from gcsfs.retry import HttpError
from jobs import MakeJob, curve, outputs
from training import RecordedEvents, history

from artifacts.safetensors import write_arrays
from configs.errors import Failed, Refused
from runtimes.contract import State, StepBatch
from runtimes.data.loader import Loader
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import TrainJob
from runtimes.torch.runtime import TheRuntime
from runtimes.torch.step import Update
from runtimes.train import training_loop, validation
from runtimes.train.checkpoints import CheckpointError, Checkpoints, Saver
from runtimes.train.throughput import Profiling
from runtimes.train.training_loop import train
from tasks.child_process import JobFailed, run_job

pytestmark = pytest.mark.slow

SHORT = {"steps": 6, "logging_steps": 1, "checkpointing_steps": 2, "ema_decay": 0.9}
HOLDOUT_LOSS = {"every_n_steps": 3, "samples": 4, "draws": 2}


@pytest.fixture(autouse=True)
def _no_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting them takes longer than all steps of these tests."""
    monkeypatch.setattr(TheRuntime, "flops", lambda runtime, batch: None)


def run(job: TrainJob, until: float = math.inf) -> RecordedEvents:
    """Train, to the end or until it has reported a step."""
    heard = RecordedEvents(("progress", until))
    assert train(job, heard, heard.stop) == (until > job.train["steps"])
    return heard


def test_the_loop_goes_on_while_a_checkpoint_is_written(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, reported, writing = Checkpoints.save, threading.Event(), list[int]()

    def slow(self: Checkpoints, step: int, *arguments: Any, **more: Any) -> Any:
        writing.append(step)
        assert reported.wait(60), "the loop waits for the disk"
        return save(self, step, *arguments, **more)

    class Reported(RecordedEvents):
        def emit(self, event: str, **fields: Any) -> None:
            super().emit(event, **fields)
            if event == "progress" and fields["step"] == 3:
                reported.set()

    monkeypatch.setattr(Checkpoints, "save", slow)
    heard = Reported()
    assert train(make_job(steps=4, logging_steps=1, checkpointing_steps=2), heard, heard.stop)
    assert writing == [2, 4]
    kinds = [(kind, fields["step"]) for kind, fields in heard.events if "step" in fields]
    assert kinds.index(("checkpoint", 2)) > kinds.index(("progress", 3))
    for event in heard.of("checkpoint"):
        assert 0 <= event["blocked"] <= event["seconds"] and event["bytes"] > 10**5


def test_a_full_disk_costs_the_checkpoint_but_not_the_run(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def full(sink: Any, arrays: Any) -> None:
        if len(written) == 4:  # the groups of the first checkpoint
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append("")
        write_arrays(sink, arrays)

    monkeypatch.setattr("runtimes.train.checkpoints.write_arrays", full)
    job, whole = make_job("full", **SHORT), make_job("whole", **SHORT)
    heard = run(job)
    assert [event["step"] for event in heard.of("checkpoint")] == [2]
    (first, second) = (event["message"] for event in heard.of("warning"))
    assert "step-00000004 could not be written: No space left on device" in first
    assert "the last good one is of step 2" in first and "step-00000006" in second
    heard = RecordedEvents(("progress", 3))
    with pytest.raises(CheckpointError, match="the last good one is of step 2"):
        train(job, heard, heard.stop)
    monkeypatch.undo()
    assert run(job).of("start")[0]["step"] == 2
    run(whole)
    assert outputs(job) == outputs(whole)


def test_a_store_s_error_costs_checkpoints_but_neither_the_run_nor_its_weights(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise HttpError({"code": 503, "message": "Service Unavailable"})

    monkeypatch.setattr("artifacts.records.write_record", away)
    away_job, whole = make_job("away", **SHORT), make_job("whole", **SHORT)
    heard = run(away_job)
    assert not heard.of("checkpoint")
    messages = [event["message"] for event in heard.of("warning")]
    assert [step in message for step, message in zip("246", messages, strict=True)] == [True] * 3
    assert "HttpError: Service Unavailable, 503; there is none before it" in messages[2]
    monkeypatch.undo()
    run(whole)
    assert outputs(away_job) == outputs(whole)


def test_held_out_losses_are_the_same_however_often_it_is_stopped(make_job: MakeJob) -> None:
    settings = {
        "steps": 9,
        "logging_steps": 1,
        "checkpointing_steps": 4,
        "holdout_loss": HOLDOUT_LOSS,
    }
    whole, parts = make_job("whole", **settings), make_job("parts", **settings)
    heard = run(whole)
    for until in (3, 5, 6):
        run(parts, until)
    run(parts)
    assert outputs(parts) == outputs(whole)
    lines = [line for line in history(whole) if "validation_loss" in line]
    told = [(event["step"], event["loss"], event["error"]) for event in heard.of("validation")]
    assert [line["step"] for line in lines] == [3, 6, 9]
    assert told == [(n["step"], n["validation_loss"], n["validation_error"]) for n in lines]
    assert len({loss for _, loss, _ in told}) == 3 and all(error > 0 for _, _, error in told)
    assert curve(whole, "validation_loss") == curve(parts, "validation_loss") == [3, 6, 9]
    assert curve(whole, "loss") == curve(parts, "loss") == list(range(1, 10))


def test_validation_changes_nothing_and_needs_held_out_samples(
    make_job: MakeJob, write_latents: Callable[..., str], tmp_path: Path
) -> None:
    with_it, without = (
        make_job("with", holdout_loss=HOLDOUT_LOSS, ema_decay=0.9),
        make_job("without", ema_decay=0.9),
    )
    run(with_it)
    run(without)
    weights = "unet/diffusion_pytorch_model.safetensors"
    assert outputs(with_it)[weights] == outputs(without)[weights]
    none = write_latents(str(tmp_path / "none"), [{"train/8x8": 4}])
    with pytest.raises(Refused, match=r"no held-out samples: raise encode\.holdout"):
        run(make_job("none", latents=none, holdout_loss=HOLDOUT_LOSS))


def test_a_validation_swaps_the_average_in_once(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    swaps, swap = list[None](), Update._swap

    def counted(update: Update) -> None:
        swaps.append(None)
        swap(update)

    monkeypatch.setattr(Update, "_swap", counted)
    run(make_job(steps=3, holdout_loss={**HOLDOUT_LOSS, "draws": 5}, ema_decay=0.9))
    assert len(swaps) == 2


def test_the_end_of_a_run_copies_only_what_it_publishes(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, write = list[set[str]](), training_loop.write_result

    def recorded(job: TrainJob, base: Base, state: State, history: Any) -> Any:
        written.append(set(state))
        return write(job, base, state, history)

    monkeypatch.setattr(training_loop, "write_result", recorded)
    run(make_job("averaged", steps=1, ema_decay=0.9))
    run(make_job("plain", steps=1))
    assert written == [{"ema"}, {"weights"}]


def test_the_best_checkpoints_are_those_of_the_lowest_held_out_loss(make_job: MakeJob) -> None:
    job = make_job(
        steps=8,
        checkpointing_steps=2,
        checkpoints_total_limit=1,
        keep_best=1,
        holdout_loss={**HOLDOUT_LOSS, "every_n_steps": 2},
        learning_rate=1.0,  # so that it gets worse
    )
    losses = {event["step"]: event["loss"] for event in run(job).of("validation")}
    best = min(losses, key=lambda step: losses[step])
    assert best != 8
    kept = sorted(path.name for path in Path(job.work, "checkpoints").iterdir())
    assert kept == [f"step-{best:08d}", "step-00000008"]


def poison(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Batches of these numbers give a loss of NaN."""
    batch = Loader.batch

    def poisoned(loader: Loader, number: int) -> StepBatch:
        made = batch(loader, number)
        return replace(made, target=made.target * np.nan) if number in numbers else made

    monkeypatch.setattr(Loader, "batch", poisoned)


SKIP = {"steps": 9, "ema_decay": 0.9, "divergence": {"action": "skip", "max_skips": 2}}


def test_a_batch_that_ruins_the_run_is_left_out(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Loader.batch
    clean = make_job("clean", **SKIP, logging_steps=4, checkpointing_steps=3)
    with monkeypatch.context() as patch:
        patch.setattr(Loader, "batch", lambda loader, n: batch(loader, n + (n > 4) + (n > 4)))
        run(clean)
    poison(monkeypatch, 5, 6)
    job = make_job("poisoned", **SKIP, logging_steps=4, checkpointing_steps=3)
    heard = run(job)
    assert [event["left_out"] for event in heard.of("back")] == [5, 6]
    assert "at step 6: back to step 3, batch 5 is left out" in heard.of("warning")[0]["message"]
    lines, expected = history(job), history(clean)
    assert [line.pop("skipped", None) for line in lines] == [None] * 5 + [[5, 6]] + [None] * 3
    assert lines == expected
    weights = "unet/diffusion_pytorch_model.safetensors"
    assert outputs(job)[weights] == outputs(clean)[weights]
    assert curve(job, "loss") == [4, 8, 9]
    saved = Checkpoints(job.work, 9).latest()
    assert saved is not None and saved.facts["skipped"] == [5, 6]


def test_a_run_that_leaves_out_batches_is_exactly_repeatable(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, 2, 6)
    whole = make_job("whole", **SKIP, logging_steps=9, checkpointing_steps=100)
    heard = run(whole)
    assert [event["step"] for event in heard.of("back")] == [0, 0], (
        "the start is kept to go back to"
    )
    parts = make_job("parts", **SKIP, logging_steps=1, checkpointing_steps=2)
    for until in (2, 4, 7):
        run(parts, until)
    run(parts)
    assert outputs(parts) == outputs(whole)


def stop_in_measurement(
    job: TrainJob, number: int, monkeypatch: pytest.MonkeyPatch
) -> RecordedEvents:
    """Train until a stop request in the held-out loss of this number, from 1."""
    measure, heard, count = validation.measure, RecordedEvents(), itertools.count(1)

    def interrupted(runtime: Any, holdout: Any, stopping: Any) -> Any:
        if next(count) == number:
            heard.stop.requested = True
        return measure(runtime, holdout, stopping)

    with monkeypatch.context() as patch:
        patch.setattr(validation, "measure", interrupted)
        assert not train(job, heard, heard.stop)
    return heard


def test_a_score_that_a_stop_interrupted_is_measured_after_a_rollback(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, 2)
    settings = {"steps": 6, "logging_steps": 1, "checkpointing_steps": 2, "learning_rate": 0.02}
    held_out = {"holdout_loss": {**HOLDOUT_LOSS, "every_n_steps": 2}, "best_checkpoint": {}}
    divergence = {"divergence": {"action": "skip"}}
    whole, parts = (make_job(n, **settings, **held_out, **divergence) for n in ("whole", "parts"))
    run(whole)
    stop_in_measurement(parts, 1, monkeypatch)
    run(parts)
    scored = [[n["step"] for n in history(one) if "validation_loss" in n] for one in (whole, parts)]
    assert scored == [[2, 4, 6], [2, 4, 6]]
    assert outputs(parts) == outputs(whole)


def test_the_last_held_out_loss_is_measured_whatever_stops_it(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"steps": 6, "checkpointing_steps": 3, "holdout_loss": HOLDOUT_LOSS}
    whole, parts = make_job("whole", **settings), make_job("parts", **settings)
    run(whole)
    stop_in_measurement(parts, 2, monkeypatch)
    run(parts)
    assert outputs(parts) == outputs(whole)
    assert "validation_loss" in history(parts)[-1]


def test_a_run_that_diverged_goes_on_with_other_settings_of_recovery(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, 5)
    settings = {"steps": 9, "logging_steps": 1, "checkpointing_steps": 3}
    with pytest.raises(Failed, match=r": lower train\.learning_rate$"):
        run(make_job(**settings))
    with pytest.raises(Failed, match=r"or set train\.mixed_precision to no$"):
        run(make_job("half", **settings, mixed_precision="bf16"))
    heard = run(make_job(**settings, divergence={"action": "skip"}))
    assert heard.of("start")[0]["step"] == 3
    assert [event["left_out"] for event in heard.of("back")] == [5]


@pytest.mark.parametrize("steps", [4, pytest.param(8, marks=pytest.mark.extended)])
def test_a_run_at_a_constant_rate_goes_on_with_other_steps(make_job: MakeJob, steps: int) -> None:
    settings = {"logging_steps": 1, "checkpointing_steps": 2, "checkpoints_total_limit": 9}
    run(make_job("one", **settings, steps=6))
    other, whole = (make_job(name, **settings, steps=steps) for name in ("one", "whole"))
    assert run(other).of("start")[0]["step"] == min(steps, 6)
    run(whole)
    assert outputs(other) == outputs(whole)
    average = {"ema_decay": 0.9, "ema_every_n_steps": 2}  # its last step updates the average
    for name, given in {"falling": {"lr_scheduler": "linear"}, "average": average}.items():
        run(make_job(name, **settings, **given, steps=2))
        for other_steps in (1, 3):  # before and after the only checkpoint
            with pytest.raises(Refused, match=rf"train\.steps=2, this one has {other_steps}"):
                run(make_job(name, **settings, **given, steps=other_steps))


def test_too_many_ruinous_batches_end_the_run(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, 2, 3, 4)
    job = make_job(**SKIP, logging_steps=1)
    with pytest.raises(Failed, match=r"at step 3, and 2 batches have been left out already"):
        run(job)


def test_a_loss_far_above_the_mean_is_gone_back_from_too(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Loader.batch

    def loud(loader: Loader, number: int) -> StepBatch:
        made = batch(loader, number)
        return replace(made, weight=made.weight * np.float32(50)) if number in (12, 13) else made

    monkeypatch.setattr(Loader, "batch", loud)
    policy = {"action": "skip", "factor": 9.0, "patience": 2}
    job = make_job(
        steps=16,
        logging_steps=1,
        checkpointing_steps=1,
        checkpoints_total_limit=1,
        divergence=policy,
    )
    heard = run(job)
    # With batch 12 left out, batch 13 alone is no divergence.
    assert [(event["step"], event["left_out"]) for event in heard.of("back")] == [(12, 12)]
    stopped = replace(
        job, work=f"{job.work}-2", train={**job.train, "divergence": {**policy, "action": "stop"}}
    )
    with pytest.raises(Failed, match=r"times the recent mean at step 14: lower train"):
        run(stopped)


def test_chosen_steps_are_traced(make_job: MakeJob) -> None:
    """Two of five steps, and nothing of the others: each updates the weights once."""
    job = make_job(steps=5, logging_steps=1, profile={"start": 1, "steps": 2})
    run(job)
    (trace,) = Path(job.work, "profile").iterdir()
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    updates = [event for event in events if event.get("name", "").startswith("Optimizer.step#")]
    assert len(updates) == 2


def test_a_trace_that_a_store_does_not_accept_costs_neither_the_run_nor_its_weights(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first trace ends between steps, the second one with the run."""

    def refuse(fs: MemoryFileSystem, path: str, target: str, **more: Any) -> None:
        raise OSError("https://user:secret@host is away")

    monkeypatch.setattr(MemoryFileSystem, "put_file", refuse)
    for start in (1, 3):
        caplog.clear()
        profile = {"start": start, "steps": 2}
        job = make_job(f"from-{start}", steps=5, logging_steps=1, profile=profile)
        run(replace(job, work=f"memory://{uuid4()}"))
        assert "unet/diffusion_pytorch_model.safetensors" in outputs(job)
        assert "the profiler trace could not be stored: https://" in caplog.text
        assert "secret" not in caplog.text


def test_the_checkpoint_writer_ends_even_if_the_profiler_fails(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Saver] = []
    monkeypatch.setattr(Saver, "close", lambda saver: closed.append(saver))

    def fail(profiling: Profiling) -> None:
        raise RuntimeError("no trace")

    monkeypatch.setattr(Profiling, "close", fail)
    with pytest.raises(RuntimeError, match="no trace"):
        run(make_job(steps=1))
    assert len(closed) == 1


def test_weights_and_biases_without_a_key_is_wrong_input(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr(
        "runtimes.train.training_loop.open_runtime", lambda *_: pytest.fail("work has started")
    )
    with pytest.raises(Refused, match="WANDB_API_KEY"):
        run(make_job(wandb={"project": "p"}))


@pytest.mark.soak
def test_two_processes_go_back_together(make_job: MakeJob) -> None:
    policy = {"action": "skip", "max_skips": 1}
    job = make_job(
        steps=9,
        logging_steps=2,
        processes=2,
        divergence=policy,
        learning_rate=1e18,
        max_grad_norm=None,
    )
    heard: list[dict[str, Any]] = []
    with pytest.raises(JobFailed, match="1 batches have been left out already"):
        run_job(job, heard.append)
    assert [event["left_out"] for event in heard if event["event"] == "back"] == [1]
