"""The best checkpoint is published, training stops early, and a resumed run does the same."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import MakeJob, outputs
from safetensors.numpy import load_file
from training import RecordedEvents

from configs.errors import Refused
from configs.settings.train import Train
from runtimes.data.loader import Holdout
from runtimes.process.job import Events, TrainJob
from runtimes.process.launcher import Stop
from runtimes.torch.runtime import TheRuntime
from runtimes.train import validation
from runtimes.train import validation as train_measurements
from runtimes.train.checkpoints import Checkpoints
from runtimes.train.training_loop import train
from runtimes.train.validation import CheckpointRanking, HeldOutLoss, scores_path

WEIGHTS = "unet/diffusion_pytorch_model.safetensors"
#: A rising learning rate: the weights improve, then get worse.
SETTINGS: dict[str, Any] = {
    "steps": 20,
    "logging_steps": 1,
    "checkpointing_steps": 2,
    "checkpoints_total_limit": 1,
    "holdout_loss": {"every_n_steps": 2, "samples": 4, "draws": 2},
    "ema_decay": 0.5,
    "learning_rate": 0.1,
    "lr_warmup_steps": 20,
}


def ranking(steps: int = 12, interval: int = 2, **rule: Any) -> CheckpointRanking:
    holdout = {"every_n_steps": interval}
    given: dict[str, Any] = {"best_checkpoint": rule, "checkpointing_steps": interval}
    if rule.get("metric", "holdout_loss") != "holdout_loss":
        given["sample_every_n_steps"] = interval
    return CheckpointRanking(Train(steps=steps, holdout_loss=holdout, **given))


def lines(scores: dict[int, float], until: int, field: str = "validation_loss") -> list[str]:
    """History lines, some with a score."""
    known = {step: {field: score} for step, score in scores.items()}
    return [json.dumps({"step": n, "loss": 1.0, **known.get(n, {})}) for n in range(1, until + 1)]


def test_the_lowest_loss_or_the_highest_score_is_the_best() -> None:
    history = lines({2: 0.5, 4: 0.2, 6: 0.9}, 6)
    assert ranking().best_first(history) == [4, 2, 6]
    assert ranking(mode="max").best_first(history) == [6, 2, 4]
    drawn = lines({2: 0.5, 4: 0.2, 6: 0.9}, 6, "digit")
    assert ranking(metric="digit").best_first(drawn) == [6, 2, 4]
    assert ranking(metric="digit", mode="min").best_first(drawn) == [4, 2, 6]


def test_of_equal_checkpoints_the_earlier_is_the_best() -> None:
    assert ranking().best_first(lines({2: 0.3, 4: 0.2, 6: 0.2}, 6)) == [4, 6, 2]


def test_candidates_are_the_scheduled_checkpoints_and_the_last_step() -> None:
    """A stop request may have left a checkpoint, with a loss, between them."""
    history = lines({2: 0.5, 3: 0.1, 4: 0.4, 7: 0.3}, 7)
    assert ranking(steps=7).best_first(history) == [7, 4, 2]
    assert ranking(steps=12).best_first(history) == [4, 2]


def test_patience_counts_checkpoints_without_an_improvement() -> None:
    losses = {2: 0.5, 4: 0.4, 6: 0.41, 8: 0.39, 10: 0.38}
    exhausted = [
        ranking(patience=2, min_delta=delta).is_exhausted(lines(losses, until))
        for delta in (0.0, 0.05)
        for until in (2, 4, 6, 8, 10)
    ]
    assert exhausted == [False] * 5 + [False, False, False, True, True]
    assert not ranking().is_exhausted(lines(dict.fromkeys(range(2, 12, 2), 1.0), 12))
    rising = lines({2: 0.4, 4: 0.5, 6: 0.6}, 6, "digit")
    assert not ranking(metric="digit", patience=1).is_exhausted(rising)


def test_the_reason_names_the_metric_and_what_was_lost() -> None:
    history = lines({2: 0.5, 4: 0.25}, 5)
    assert ranking().reason(4, history) == "the lowest holdout_loss of 2 checkpoints: 0.25"
    assert ranking().reason(2, history).endswith("0.5; the checkpoint of step 4 was lost")
    assert "no checkpoint with a holdout_loss was left" in ranking().reason(5, lines({}, 5))


@pytest.fixture(autouse=True)
def _no_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting them takes longer than all steps of these tests."""
    monkeypatch.setattr(TheRuntime, "flops", lambda runtime, batch: None)


def run(job: TrainJob) -> tuple[dict[str, Any], dict[int, float]]:
    """The result of a whole run, and its held-out losses by step."""
    heard = RecordedEvents()
    assert train(job, heard, heard.stop)
    losses = {event["step"]: event["loss"] for event in heard.of("validation")}
    return heard.of("result")[0], losses


def stopped(job: TrainJob, event: str, step: int) -> RecordedEvents:
    """Train until an event of a step."""
    heard = RecordedEvents((event, step))
    assert not train(job, heard, heard.stop)
    return heard


@pytest.mark.slow
def test_the_average_of_the_best_checkpoint_is_published(make_job: MakeJob) -> None:
    job, plain = make_job(**SETTINGS, best_checkpoint={}), make_job("plain", **SETTINGS)
    result, losses = run(job)
    last, _ = run(plain)
    best = min(losses, key=lambda step: losses[step])
    assert 2 < best < 18 and result["step"] == 20, "neither the first, nor one of the newest"
    assert (result["chosen_step"], result["stopped_early"]) == (best, False)
    assert result["chosen_because"].startswith("the lowest holdout_loss of 10 checkpoints")
    kept = sorted(path.name for path in Path(job.work, "checkpoints").iterdir())
    assert kept == [f"step-{best:08d}", "step-00000020"]
    average = Checkpoints(job.work, 9).read(best).state["ema"]
    published = load_file(Path(job.out, WEIGHTS))
    for name, array in published.items():
        np.testing.assert_array_equal(array, average[f"unet.{name}"][...], err_msg=name)
    assert (last["chosen_step"], last["chosen_because"]) == (20, "")
    assert outputs(plain)[WEIGHTS] != outputs(job)[WEIGHTS]
    assert outputs(plain)["history.jsonl"] == outputs(job)["history.jsonl"]


@pytest.mark.slow
def test_a_resumed_run_stops_early_at_the_same_step_with_the_same_weights(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SETTINGS, "best_checkpoint": {"patience": 2}}
    whole, parts = make_job("whole", **settings), make_job("parts", **settings)
    result, losses = run(whole)
    best = min(losses, key=lambda step: losses[step])
    assert result["stopped_early"] and result["step"] == best + 4 < 20
    assert result["chosen_step"] == best
    stopped(parts, "progress", best + 1)  # between checkpoints
    stopped(parts, "progress", best + 3)  # one checkpoint of patience used
    finish = TheRuntime.shutdown  # a kill between the early stop and the result

    def killed(runtime: TheRuntime) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TheRuntime, "shutdown", killed)
    with pytest.raises(KeyboardInterrupt):
        train(parts, Events(), Stop())
    monkeypatch.setattr(TheRuntime, "shutdown", finish)
    heard = RecordedEvents()
    assert train(parts, heard, heard.stop)
    assert not heard.of("progress"), "no step after the early stop"
    assert heard.of("result")[0]["chosen_step"] == best
    assert outputs(parts) == outputs(whole)


@pytest.mark.slow
def test_a_stop_request_during_the_last_validation_leaves_it_to_the_next_process(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TheRuntime, "sample", lambda *_: np.zeros((1, 8, 8, 3), np.uint8))
    settings = {**SETTINGS, "steps": 5, "sample_every_n_steps": 5, "best_checkpoint": {}}
    whole, parts = (with_prompts(make_job(name, **settings)) for name in ("whole", "parts"))
    result, losses = run(whole)
    assert list(losses) == [2, 4, 5], "the last step is scored although it is not scheduled"
    measure, heard = validation.measure, RecordedEvents()

    def interrupted(runtime: Any, holdout: Holdout, stopping: Any) -> HeldOutLoss | None:
        if len(heard.of("validation")) == 2:
            heard.stop.requested = True
        return measure(runtime, holdout, stopping)

    monkeypatch.setattr(validation, "measure", interrupted)
    assert not train(parts, heard, heard.stop), "the run has no result yet"
    monkeypatch.setattr(validation, "measure", measure)
    again, found = run(parts)
    assert list(found) == [5] and again["chosen_step"] == result["chosen_step"]
    assert outputs(parts) == outputs(whole)


@pytest.mark.slow
def test_a_damaged_best_checkpoint_leaves_the_next_best(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(**{**SETTINGS, "steps": 14}, keep_best=2, best_checkpoint={})
    damaged, first_valid = list[int](), Checkpoints.first_valid

    def after_damage(self: Checkpoints, steps: list[int]) -> Any:
        damaged.append(steps[0])
        path = Path(job.work, f"checkpoints/step-{steps[0]:08d}/ema.safetensors")
        path.write_bytes(path.read_bytes()[:-1])
        return first_valid(self, steps)

    monkeypatch.setattr(Checkpoints, "first_valid", after_damage)
    result, losses = run(job)
    order = sorted(losses, key=lambda step: losses[step])
    assert damaged == order[:1] and result["chosen_step"] == order[1]
    assert f"the checkpoint of step {order[0]} was lost" in result["chosen_because"]
    assert f"step-{order[0]:08d} is skipped" in caplog.text


class Stage(RecordedEvents):
    """Scores each sample picture, as the train stage does."""

    def __init__(self, scores: dict[int, float], until: tuple[str, int] = ("", 0)) -> None:
        super().__init__(until)
        self._scores = scores

    def emit(self, event: str, **fields: Any) -> None:
        super().emit(event, **fields)
        if event == "sample" and not self.stop.requested:
            score = self._scores[fields["step"]]
            Path(scores_path(fields["path"])).write_text(json.dumps({"digit": score}))


@pytest.mark.slow
def test_sample_pictures_choose_and_stop_as_their_scores_demand(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_measurements, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(TheRuntime, "sample", lambda *_: np.zeros((1, 8, 8, 3), np.uint8))
    rule = {"metric": "digit", "patience": 2}
    settings = {**SETTINGS, "sample_every_n_steps": 2, "holdout_loss": {}, "best_checkpoint": rule}
    whole, parts = (make_job(name, **settings) for name in ("whole", "parts"))
    whole, parts = (with_prompts(job) for job in (whole, parts))
    scores = {2: 0.1, 4: 0.6, 6: 0.5, 8: 0.6, 10: 0.9}
    stage = Stage(scores)
    assert train(whole, stage, stage.stop)
    (result,) = stage.of("result")
    assert (result["step"], result["chosen_step"], result["stopped_early"]) == (8, 4, True)
    assert result["chosen_because"] == "the highest digit of 4 checkpoints: 0.6"
    stage = Stage(scores, ("sample", 6))  # killed before the stage has scored the picture
    assert not train(parts, stage, stage.stop)
    stage = Stage(scores)
    assert train(parts, stage, stage.stop)
    assert [event["step"] for event in stage.of("sample")] == [6, 8], "it is drawn again"
    assert outputs(parts) == outputs(whole)


def with_prompts(job: TrainJob) -> TrainJob:
    return TrainJob(**{**vars(job), "sample_prompts": ("a cat",)})


def test_a_rule_by_samples_needs_prompts(make_job: MakeJob) -> None:
    job = make_job(
        checkpointing_steps=2, sample_every_n_steps=2, best_checkpoint={"metric": "clip_score"}
    )
    with pytest.raises(Refused, match="metric clip_score requires sample prompts"):
        train(job, Events(), Stop())


@pytest.mark.slow
def test_a_folder_of_a_longer_run_is_refused(make_job: MakeJob) -> None:
    """The best checkpoint of its first steps may be deleted."""
    run(make_job(**{**SETTINGS, "steps": 4}, best_checkpoint={}))
    with pytest.raises(Refused, match="holds a run of 4 steps, and its best checkpoint"):
        run(make_job(**{**SETTINGS, "steps": 3}, best_checkpoint={}))
