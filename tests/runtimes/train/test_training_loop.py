"""The training loop: stopped, resumed or out of luck, it loses no step that it says it has."""

import json
import shutil
import threading
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from jobs import SETTINGS, MakeJob, outputs
from training import RecordedEvents, newest

from configs.errors import Failed, Refused
from configs.settings.train import Train
from runtimes.data.loader import Loader
from runtimes.process.job import TrainJob
from runtimes.process.launcher import Stop
from runtimes.torch.runtime import TheRuntime
from runtimes.train.checkpoints import CheckpointError, Checkpoints, check_same_run
from runtimes.train.training_loop import train

pytestmark = pytest.mark.slow
OTHERS = ("adafactor", "adamw_schedule_free", "came", "lion", "muon")
without_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="torch/test_make_optimizer.py runs it"
)


@pytest.fixture(autouse=True)
def _known_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting them takes longer than all steps of these tests."""
    monkeypatch.setattr(TheRuntime, "flops", lambda runtime, batch: 2e9)


def stopping_at(step: int, job: TrainJob) -> bool:
    """Ask the run to stop once it has reported `step`."""
    heard = RecordedEvents(("progress", step))
    return train(job, heard, heard.stop)


def test_stopped_and_resumed_the_history_is_whole(make_job: MakeJob) -> None:
    settings = {**SETTINGS, "steps": 12}
    whole, job = make_job("whole", **settings), make_job("parts", **settings)
    assert train(whole, RecordedEvents(), Stop())
    assert not stopping_at(4, job)
    assert not stopping_at(8, job)
    assert not Path(job.out).exists()
    assert train(job, RecordedEvents(), Stop())
    assert outputs(job) == outputs(whole)
    lines = [json.loads(line) for line in outputs(job)["history.jsonl"].splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert set(lines[0]) == {"step", "loss", "learning_rate", "grad_norm"}


@pytest.mark.parametrize(
    "optimizer",
    [
        "prodigy",
        *(pytest.param(name, marks=pytest.mark.extended) for name in OTHERS),
        *(pytest.param(name, marks=without_bitsandbytes) for name in ("adamw_8bit", "lion_8bit")),
    ],
)
def test_every_optimizer_resumes_to_the_bit(make_job: MakeJob, optimizer: str) -> None:
    settings = {"steps": 6, "logging_steps": 1, "optimizer": optimizer, "learning_rate": 1e-3}
    whole, job = make_job("whole", **settings), make_job("parts", **settings)
    assert train(whole, RecordedEvents(), Stop())
    assert not stopping_at(3, job)
    assert train(job, RecordedEvents(), Stop())
    assert outputs(job) == outputs(whole)


def test_a_broken_checkpoint_costs_steps_not_the_result(make_job: MakeJob) -> None:
    settings = {**SETTINGS, "steps": 10, "checkpointing_steps": 3}
    whole, job = make_job("whole", **settings), make_job("broken", **settings)
    assert train(whole, RecordedEvents(), Stop())
    assert not stopping_at(7, job)
    newest = sorted(Path(job.work, "checkpoints").iterdir())[-1]
    (newest / "ema.safetensors").write_bytes((newest / "ema.safetensors").read_bytes()[:-4])
    heard = RecordedEvents()
    assert train(job, heard, Stop())
    assert heard.of("start")[0]["step"] == 6
    assert outputs(job) == outputs(whole)


def test_events_say_how_it_goes(make_job: MakeJob) -> None:
    heard = RecordedEvents()
    sampler = {"seed": 0, "num_inference_steps": 1, "guidance_scale": 1.0, "batch_size": 2}
    job = make_job(
        steps=5, logging_steps=2, checkpointing_steps=2, sample_every_n_steps=4, peak_tflops=0.5
    )
    assert train(replace(job, sample_prompts=("a", "b"), sampler=sampler), heard, Stop())
    assert heard.events[0][0] == "start" and heard.events[-1][0] == "result"
    assert heard.events[0][1]["versions"]["torch"] == version("torch")
    assert [event["step"] for event in heard.of("progress")] == [2, 4, 5]
    assert [event["step"] for event in heard.of("checkpoint")] == [2, 4]
    assert Path(heard.of("sample")[0]["path"]).read_bytes().startswith(b"\x89PNG")
    last = heard.of("progress")[-1]
    assert last["images_per_second"] > 0 and 0 <= last["data_wait"] <= 1
    assert last["eta_seconds"] == 0 and last["memory_bytes"] > 10**6
    assert last["tflops"] == pytest.approx(2e9 * last["images_per_second"] / 4 / 1e12)
    assert last["mfu"] == pytest.approx(last["tflops"] / 0.5)


def test_a_loss_of_nan_ends_the_run_before_it_is_saved(make_job: MakeJob) -> None:
    job = make_job(steps=20, learning_rate=1e18, max_grad_norm=None, checkpointing_steps=1)
    with pytest.raises(Failed, match=r"at step \d+: lower train\.learning_rate"):
        train(job, RecordedEvents(), Stop())
    saved = Checkpoints(job.work, 9).latest()
    assert saved is not None and "NaN" not in "".join(saved.history)


def test_another_run_s_work_folder_is_refused(make_job: MakeJob) -> None:
    assert train(make_job(steps=4, checkpointing_steps=2), RecordedEvents(), Stop())
    settings = {"steps": 4, "checkpointing_steps": 3, "micro_batch_size": 2, "logging_steps": 1}
    assert train(make_job(**settings), RecordedEvents(), Stop()), "these may change"
    with pytest.raises(Refused, match=r"holds a run with train\.learning_rate=0\.001"):
        train(make_job(steps=4, learning_rate=2e-3), RecordedEvents(), Stop())


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"guidance_scale": 3.5}, r"train\.guidance_scale=3\.5, this one has 1\.0:"),
        (
            {"best_checkpoint": {}, "holdout_loss": {"every_n_steps": 2}},
            r"train\.best_checkpoint=.*, this one has None:",
        ),
    ],
)
def test_a_setting_that_is_turned_off_is_another_run(
    make_job: MakeJob, given: dict[str, Any], named: str
) -> None:
    job = make_job(steps=4, checkpointing_steps=2)
    assert train(job, RecordedEvents(), Stop())
    saved = Checkpoints(job.work, 9).latest()
    assert saved is not None
    check_same_run(saved, job, Train(**job.train))
    saved.facts["train"] |= given
    with pytest.raises(Refused, match=named):
        check_same_run(saved, job, Train(**job.train))


def test_wrong_train_settings_are_wrong_input(make_job: MakeJob) -> None:
    job = make_job()
    with pytest.raises(Refused, match=r"^train\.steps: .*greater than 0$"):
        train(replace(job, train={**job.train, "steps": 0}), RecordedEvents(), Stop())


def test_stopped_without_room_for_a_checkpoint_is_no_clean_stop(make_job: MakeJob) -> None:
    job = make_job(**SETTINGS)
    Path(job.work).mkdir(parents=True)
    Path(job.work, "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"could not be written: .*; there is none"):
        stopping_at(4, job)


def test_sample_pictures_that_fail_cost_no_step(
    make_job: MakeJob, tiny_sdxl: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_sdxl, tmp_path / "model")
    shutil.rmtree(model / "text_encoder")
    sampler = {"seed": 0, "num_inference_steps": 1, "guidance_scale": 1.0, "batch_size": 2}
    job = make_job(model=str(model), steps=4, sample_every_n_steps=2)
    heard = RecordedEvents()
    assert train(replace(job, sample_prompts=("a",), sampler=sampler), heard, Stop())
    assert ["no sample pictures" in event["message"] for event in heard.of("warning")] == [True] * 2
    assert not heard.of("sample")


def test_it_stops_while_the_loader_stalls(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, batch = threading.Event(), Loader.batch

    def stall(loader: Loader, step: int) -> Any:
        return batch(loader, step) if step < 3 or released.wait(60) else None

    monkeypatch.setattr(Loader, "batch", stall)
    monkeypatch.setattr("runtimes.data.loader.JOIN_SECONDS", 0.1)
    stop = Stop()
    asking = threading.Timer(0.3, lambda: setattr(stop, "requested", True))

    class Asking(RecordedEvents):
        def emit(self, event: str, **fields: Any) -> None:
            super().emit(event, **fields)
            if event == "progress":
                asking.start()

    job = make_job(steps=9, logging_steps=3, checkpointing_steps=9)
    try:
        assert not train(job, Asking(), stop)
    finally:
        released.set()
    assert newest(Checkpoints(job.work, 9)) == 3
