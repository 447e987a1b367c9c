"""`python -m runtimes`: killed or stopped at any moment, a run ends where it would have."""

import fcntl
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runtimes.__main__ import main, only_writer
from runtimes.base import WrongInput
from runtimes.checkpoint import Checkpoints
from runtimes.events import EVENT_FD, Events
from runtimes.job import TrainJob, write_job
from runtimes.loop import train
from runtimes.recorder import Diverged
from runtimes.stop import Stop

MakeJob = Callable[..., TrainJob]
SETTINGS = {
    "steps": 60,
    "checkpoint_every": 7,
    "log_every": 2,
    "ema_decay": 0.95,
    "snr_gamma": 5.0,
    "caption_dropout": 0.2,
    "noise_offset": 0.05,
    "lr_schedule": "cosine",
    "warmup_steps": 5,
}


class Heard(Events):
    """Keeps events, and hands each to `then`."""

    def __init__(self, then: Callable[[str, dict], None] = lambda event, fields: None) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._then = then

    def emit(self, event: str, **fields: Any) -> None:
        self.events.append((event, json.loads(json.dumps(fields))))
        self._then(event, fields)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.events if event == kind]


def outputs(job: TrainJob) -> dict[str, bytes]:
    out = Path(job.out)
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}


class Child:
    """A runtime's process, started as a stage starts it."""

    def __init__(self, job: TrainJob, folder: Path) -> None:
        path = folder / "job.json"
        write_job(job, path)
        events, write = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "runtimes", str(path)],
            env={
                **os.environ,
                EVENT_FD: str(write),
                "OMP_NUM_THREADS": str(torch.get_num_threads()),
            },
            pass_fds=(write,),
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        os.close(write)
        self.stream = os.fdopen(events)

    def events(self) -> Iterator[dict[str, Any]]:
        for line in self.stream:
            yield json.loads(line)

    def step_of_first(self, kind: str) -> int:
        return next(event["step"] for event in self.events() if event["event"] == kind)

    def end(self) -> int:
        for _ in self.stream:
            pass
        return self.process.wait(60)


@pytest.mark.slow
def test_killed_and_stopped_it_ends_with_the_same_bytes(make_job: MakeJob, tmp_path: Path) -> None:
    whole = make_job("whole", **SETTINGS)
    assert train(whole, Heard(), Stop())

    job = make_job("broken", **SETTINGS)
    killed = Child(job, tmp_path)
    assert killed.step_of_first("checkpoint") == 7
    time.sleep(random.random() / 3)
    killed.process.kill()
    assert killed.end() == -signal.SIGKILL

    stopped = Child(job, tmp_path)
    assert stopped.step_of_first("start") >= 7
    stopped.step_of_first("progress")
    stopped.process.terminate()
    assert stopped.end() == 143
    saved = Checkpoints(job.work, 9).latest()
    assert saved is not None

    orphaned = Child(job, tmp_path)
    assert orphaned.step_of_first("start") == saved.step
    orphaned.step_of_first("progress")
    orphaned.process.stdin.close()  # type: ignore[union-attr]
    assert orphaned.end() == 143

    last = Child(job, tmp_path)
    assert last.end() == 0
    assert outputs(job) == outputs(whole)
    assert sorted(outputs(job)) == [
        "history.jsonl",
        "unet/config.json",
        "unet/diffusion_pytorch_model.safetensors",
    ]


def stopping_at(step: int, job: TrainJob) -> bool:
    """Ask the run to stop once it has reported `step`."""
    stop = Stop()

    def hear(event: str, fields: dict) -> None:
        if event == "progress" and fields["step"] >= step:
            stop.requested = True

    return train(job, Heard(hear), stop)


def test_stopped_and_resumed_the_history_is_whole(make_job: MakeJob) -> None:
    settings = {**SETTINGS, "steps": 12}
    whole, job = make_job("whole", **settings), make_job("parts", **settings)
    assert train(whole, Heard(), Stop())
    assert not stopping_at(4, job)
    assert not stopping_at(8, job)
    assert not Path(job.out).exists()
    assert train(job, Heard(), Stop())
    assert outputs(job) == outputs(whole)
    lines = [json.loads(line) for line in outputs(job)["history.jsonl"].splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert set(lines[0]) == {"step", "loss", "learning_rate", "grad_norm"}


def test_a_broken_checkpoint_costs_steps_not_the_result(make_job: MakeJob) -> None:
    settings = {**SETTINGS, "steps": 10, "checkpoint_every": 3}
    whole, job = make_job("whole", **settings), make_job("broken", **settings)
    assert train(whole, Heard(), Stop())
    assert not stopping_at(7, job)
    newest = sorted(Path(job.work, "checkpoints").iterdir())[-1]
    (newest / "ema.safetensors").write_bytes((newest / "ema.safetensors").read_bytes()[:-4])
    heard = Heard()
    assert train(job, heard, Stop())
    assert heard.of("start")[0]["step"] == 6
    assert outputs(job) == outputs(whole)


def test_events_say_how_it_goes(make_job: MakeJob) -> None:
    heard = Heard()
    sampler = {"seed": 0, "num_inference_steps": 1, "guidance_scale": 1.0, "batch_size": 2}
    job = make_job(steps=5, log_every=2, checkpoint_every=2, sample_every=4)
    assert train(replace(job, sample_prompts=("a", "b"), sampler=sampler), heard, Stop())
    assert heard.events[0][0] == "start" and heard.events[-1][0] == "result"
    assert heard.events[0][1]["versions"]["torch"] == torch.__version__
    assert [event["step"] for event in heard.of("progress")] == [2, 4, 5]
    assert [event["step"] for event in heard.of("checkpoint")] == [2, 4]
    assert Path(heard.of("sample")[0]["path"]).read_bytes().startswith(b"\x89PNG")
    last = heard.of("progress")[-1]
    assert last["images_per_second"] > 0 and 0 <= last["data_wait"] <= 1
    assert last["eta_seconds"] == 0 and last["memory_bytes"] > 10**6


def test_a_loss_of_nan_ends_the_run_before_it_is_saved(make_job: MakeJob) -> None:
    job = make_job(steps=20, learning_rate=1e18, max_grad_norm=None, checkpoint_every=1)
    with pytest.raises(Diverged, match=r"at step \d+: lower train\.learning_rate"):
        train(job, Heard(), Stop())
    saved = Checkpoints(job.work, 9).latest()
    assert saved is not None and "NaN" not in "".join(saved.history)


def test_another_run_s_work_folder_is_refused(make_job: MakeJob) -> None:
    assert train(make_job(steps=4, checkpoint_every=2), Heard(), Stop())
    settings = {"steps": 4, "checkpoint_every": 3, "micro_batch_size": 2, "log_every": 1}
    assert train(make_job(**settings), Heard(), Stop()), "these may change"
    with pytest.raises(WrongInput, match=r"holds a run with train\.learning_rate=0\.001"):
        train(make_job(steps=4, learning_rate=2e-3), Heard(), Stop())


WRONG = {
    "model_index.json is missing": {"model": "/nowhere"},
    "no latents artifact is there": {"latents": "/nowhere"},
    "this machine has": {"device": "cuda:77"},
}


@pytest.mark.parametrize("says", WRONG)
def test_wrong_input_is_one_line_and_exit_code_2(
    make_job: MakeJob,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    says: str,
) -> None:
    monkeypatch.setattr(Stop, "listen", lambda stop: None)  # the signals are pytest's
    write_job(make_job(**WRONG[says]), tmp_path / "job.json")
    assert main([str(tmp_path / "job.json")]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ") and says in line


def test_a_work_folder_has_one_writer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    order: list[str] = []

    def second() -> None:
        with only_writer(str(tmp_path)):
            order.append("second")

    with (tmp_path / ".lock").open("a") as first, caplog.at_level(logging.WARNING, "kiln"):
        fcntl.flock(first, fcntl.LOCK_EX)
        waiting = threading.Thread(target=second)
        waiting.start()
        while "waiting for it" not in caplog.text:
            time.sleep(0.01)
        order.append("first")
    waiting.join(10)
    assert order == ["first", "second"]


def test_the_first_signal_asks_and_the_second_kills() -> None:
    lines = (
        "import os, signal, time; from runtimes.stop import Stop",
        "stop = Stop(); stop.listen(); stop.defer()",
        "os.kill(os.getpid(), signal.SIGTERM); assert stop.requested",
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)",
    )
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)]).returncode == -signal.SIGTERM


def test_a_signal_before_there_is_anything_to_save_ends_the_process() -> None:
    lines = (
        "import os, signal, time; from runtimes.stop import Stop",
        "Stop().listen(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)",
    )
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)]).returncode == 143
