"""The train stage: its events."""

import io
import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
from picture_bytes import plain_picture
from PIL import Image
from toy_recipes import base_of

from artifacts.lock import LockLost
from artifacts.safetensors import write_arrays
from artifacts.store import Artifact, KeyParts, Store
from configs.errors import Failed, Refused
from configs.load_recipe import load_recipe
from configs.settings.train import Train
from configs.settings.train_parts import Profile
from runtimes.adapters import read_layouts
from runtimes.adapters.lora_files import read_scaled
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import TrainJob, read_job, write_job
from tasks import train
from tasks.panels import Chart, Facts, Strip
from tasks.progress import Progress
from tasks.train import TrainStage, Watch, _summary, settings_for, settings_for_key

LINES = [{"step": n, "loss": 1.0 / n, "learning_rate": 1e-3} for n in range(1, 9)]


def _brightness(strip: bytes) -> dict[str, float]:
    return {"brightness": float(np.asarray(Image.open(io.BytesIO(strip))).mean())}


def test_a_rollback_discards_later_progress(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch(Progress("train"), fsspec.filesystem("memory"), _brightness)
    figures = {"images_per_second": 1.0, "data_wait": 0.0, "memory_bytes": 1, "eta_seconds": 1.0}
    with caplog.at_level(logging.INFO, "kiln"):
        for line in LINES:
            work = {"tflops": 0.5, "mfu": None}
            watch({"event": "progress", "total": 8, **line, **figures, **work})
        watch({"event": "validation", "step": 8, "loss": 0.25, "by_source": {}})
        watch({"event": "back", "step": 5, "left_out": 6})
    assert [line["step"] for line in watch.history] == [1, 2, 3, 4, 5]
    assert watch.facts["tflops"] == 0.5 and watch.facts["mfu"] is None
    assert "held-out loss 0.2500 at step 8" in caplog.text


def test_new_samples_are_scored_at_once_and_earlier_ones_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fs = fsspec.filesystem("file")
    (tmp_path := tmp_path / "run[1]").mkdir()
    for step, value in ((2, 10), (4, 20), (6, 30)):
        Image.new("RGB", (4, 4), (value,) * 3).save(tmp_path / f"step-{step:08d}.png")
    watch = Watch(Progress("train"), fs, _brightness)
    with caplog.at_level(logging.INFO, "kiln"):
        for step in (4, 6):
            path = str(tmp_path / f"step-{step:08d}.png")
            watch({"event": "sample", "step": step, "path": path})
        assert watch.scores == {4: {"brightness": 20.0}, 6: {"brightness": 30.0}}
        assert "samples of step 6: brightness 30" in caplog.text
        watch({"event": "back", "step": 5, "left_out": 6})
        assert list(watch.scores) == [4]
        assert json.loads((tmp_path / "step-00000006.json").read_text()) == {"brightness": 30.0}
        (tmp_path / "step-00000006.png").write_bytes(b"torn")
        assert watch.all_scores(str(tmp_path)) == [
            {"step": 2, "brightness": 10.0},
            {"step": 4, "brightness": 20.0},
        ]
    assert "no scores of the pictures at step 6" in caplog.text  # and the run goes on
    assert (tmp_path / "step-00000006.json").read_text() == "{}", "training does not wait for them"


def test_the_chosen_step_is_in_the_manifest_and_the_panels(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "run[1]"))
    history = [{**line, "validation_loss": 0.5} for line in LINES]
    history[3]["validation_loss"] = 0.125
    watch = Watch(Progress("train"), store.fs, _brightness)
    chosen = {"chosen_step": 4, "chosen_because": "the lowest", "stopped_early": True}
    watch({"event": "result", "files": [], "images_per_second": 1.0, **chosen})
    summary = _summary(history, watch.chosen, load_recipe("digits").train.global_batch_size)
    assert summary.items() >= {**chosen, "steps": 8, "validation_loss": 0.125}.items()
    assert summary["loss_last_tenth"] == 0.25, "of the chosen step, not of the last"
    draft = store.draft(KeyParts("train", 1, {}, {}))
    draft.write("history.jsonl", "".join(f"{json.dumps(line)}\n" for line in history).encode())
    png = plain_picture(4, 4)
    for step in range(1, 61):  # more than the strip shows
        store.fs.makedirs(f"{draft.path}/samples", exist_ok=True)
        store.fs.pipe_file(f"{draft.path}/samples/step-{step:08d}.png", png)
    panels = TrainStage.show(draft.commit(summary, {}))
    facts, chart, strip = panels
    assert isinstance(facts, Facts) and isinstance(chart, Chart) and isinstance(strip, Strip)
    assert facts.values["chosen step"] == 4 and facts.values["stopped early"] is True
    assert "chosen: step 4" in chart.svg
    assert "step 4, chosen" in [label for label, _ in strip.pictures]


def test_a_rule_by_samples_has_the_settings_of_its_scores_in_the_key() -> None:
    common = {"train.sample_every_n_steps": 50, "train.checkpointing_steps": 100}
    rule = {**common, "train.best_checkpoint": {"metric": "digit"}}
    changed = {"evaluate.num_inference_steps": 3}
    assert key(rule) != key({**rule, **changed}) and key(common) == key({**common, **changed})
    more = {"evaluate.judges": ["digits", {"name": "taste", "path": "/a"}]}
    assert key(rule) == key({**rule, **more}), "a preference model scores no sample"


def test_a_rule_by_samples_has_the_content_of_its_clip_model_in_the_key(tmp_path: Path) -> None:
    latents = Artifact(Store(str(tmp_path)), "encode", "0" * 64, {"digest": "0"})
    folders = [tmp_path / name for name in ("a", "moved", "other")]
    for folder in folders:
        folder.mkdir()
        (folder / "weights").write_text("2" if folder.name == "other" else "1")

    def keys(overrides: dict[str, Any]) -> list[str]:
        found = []
        for folder in folders:
            recipe = load_recipe("digits", {**overrides, "evaluate.clip": str(folder)})
            found.append(TrainStage(recipe, latents, base_of(recipe), folder).parts.key)
        return found

    assert len({*keys({})}) == 1
    common = {"train.sample_every_n_steps": 50, "train.checkpointing_steps": 100}
    first, moved, other = keys({**common, "train.best_checkpoint": {"metric": "clip_score"}})
    assert first == moved != other


def key(overrides: dict[str, Any]) -> dict[str, Any]:
    return settings_for_key(load_recipe("digits", overrides))


def test_epochs_become_steps_or_are_refused() -> None:
    def steps(epochs: float, samples: int, **profile: int) -> int:
        return settings_for(
            Train(epochs=epochs, global_batch_size=16, profile=Profile(**profile)), samples
        ).steps

    assert steps(2.5, 100) == 16
    assert steps(1, 16) == 1
    assert settings_for(Train(epochs=0.57, global_batch_size=57), 100).steps == 1  # as a fraction
    assert steps(1, 160, start=8, steps=2) == 10
    with pytest.raises(Refused, match="1 of 15 training samples are less than one step"):
        steps(1, 15)
    with pytest.raises(Refused, match="no training samples: add pictures"):
        steps(2, 0)
    with pytest.raises(Refused, match=r"are 10 steps: train\.profile traces steps 8 to 11"):
        steps(1, 160, start=8, steps=3)


def test_a_warmup_that_exceeds_the_steps_of_epochs_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings_for(Train(epochs=2, global_batch_size=10, lr_warmup_steps=20), 100)  # 20 steps
    assert "lr_warmup_steps" not in caplog.text
    settings_for(Train(epochs=2, global_batch_size=10, lr_warmup_steps=21), 100)
    assert "train.lr_warmup_steps: 21 exceed the 20 steps" in caplog.text


def test_the_held_out_set_counts_if_its_loss_chooses_the_checkpoint(tmp_path: Path) -> None:
    held = {"train.holdout_loss.every_n_steps": 2, "train.checkpointing_steps": 2}
    store = Store(str(tmp_path))
    latents, holdout = (
        store.draft(KeyParts("encode", 1, {"n": n}, {})).commit({"n": n}, {}) for n in (1, 2)
    )
    for rule, counts in ((None, False), ({}, True)):
        recipe = load_recipe("digits", {**held, "train.best_checkpoint": rule})
        base = base_of(recipe)
        parts = TrainStage(recipe, latents, base, base.folder, holdout=holdout).parts
        assert parts.inputs.get("holdout") == (holdout.digest if counts else None)


def test_latents_that_are_no_draws_are_in_the_key(
    tiny_sdxl: Path, tiny_flux2: Path, tmp_path: Path
) -> None:
    latents = Artifact(Store(str(tmp_path)), "encode", "0" * 64, {"digest": "0"})
    recipe = load_recipe("digits")
    for base, expected in ((tiny_sdxl, None), (tiny_flux2, "mean")):
        parts = TrainStage(recipe, latents, Base.open(base), base).parts
        assert parts.settings.get("posterior") == expected


def test_layers_that_keep_their_precision_are_in_the_key(
    tiny_flux: Path, tiny_z_image: Path, tmp_path: Path
) -> None:
    latents = Artifact(Store(str(tmp_path)), "encode", "0" * 64, {"digest": "0"})
    for base in (tiny_flux, tiny_z_image):
        opened = Base.open(base)
        for precision in (None, "int8"):
            lora = {"train.method": "lora", "train.lora.base_precision": precision}
            parts = TrainStage(load_recipe("digits", lora), latents, opened, base).parts
            kept = [*opened.family.unquantized] if precision else []
            assert parts.settings.get("unquantized", []) == kept


def test_frozen_text_encoders_of_the_step_are_in_the_key(tmp_path: Path) -> None:
    """The latents of token ids have the same bytes whatever the weights of the encoders are."""
    latents = Artifact(Store(str(tmp_path)), "encode", "0" * 64, {"digest": "0"})
    base = shutil.copytree(load_recipe("digits").model.path, tmp_path / "base")

    def inputs(**overrides: Any) -> Mapping[str, str]:
        recipe = load_recipe("digits", {n.replace("__", "."): v for n, v in overrides.items()})
        return TrainStage(recipe, latents, Base.open(base), base).inputs

    assert inputs().keys() == {"latents", "base"}
    assert inputs(encode__text="token_ids", train__train_text_encoder=True).keys() == {
        "latents",
        "base",
    }
    before = inputs(encode__text="token_ids")
    assert before == inputs() | {"text_encoders": before["text_encoders"]}
    config = base / "text_encoder/config.json"
    config.write_text(config.read_text() + " ")
    assert inputs(encode__text="token_ids")["text_encoders"] != before["text_encoders"]


def test_the_job_checks_the_lock_of_its_builder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, recipe = Store(str(tmp_path)), load_recipe("digits", {})
    jobs: list[TrainJob] = []

    def started(job: TrainJob, *_: Any, **__: Any) -> None:
        write_job(job, tmp_path / "job.json")
        sent = read_job(tmp_path / "job.json")
        assert isinstance(sent, TrainJob)
        sent.check_lock()
        jobs.append(sent)
        raise Failed("enough")

    monkeypatch.setattr(train, "run_job", started)
    monkeypatch.setattr(train, "open_latents", lambda url: SimpleNamespace(training=4))
    parts, latents = KeyParts("train", 1, {}, {}), Artifact(store, "encode", "0" * 64, {})
    with store.lock("train", parts.key) as lock, pytest.raises(Failed, match="enough"):
        draft = store.draft(parts, lock)
        TrainStage(recipe, latents, base_of(recipe), None).build(draft, Progress("train"))
    with pytest.raises(LockLost):  # released
        jobs[0].check_lock()


def test_files_of_adapters_are_in_the_key_and_reach_the_process_in_one_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, latents = Store(str(tmp_path)), Artifact(Store(str(tmp_path)), "encode", "0" * 64, {})
    latents.manifest["digest"] = "0"
    lora = {"train.method": "lora", "train.lora.rank": 2, "train.lora.target_modules": ["to_q"]}
    base = base_of(load_recipe("digits"))
    shapes = read_layouts.Layers(base).shapes["unet"]
    file = tmp_path / "adapters.safetensors"

    def write(factor: float) -> None:
        arrays = {}
        for name, (out, into) in ((n, s) for n, s in shapes.items() if n.endswith("to_q")):
            arrays[f"unet.{name}.lora_A.weight"] = np.full((2, into), factor, np.float32)
            arrays[f"unet.{name}.lora_B.weight"] = np.full((out, 2), factor, np.float32)
        with file.open("wb") as stream:
            write_arrays(stream, arrays)

    def stage(*names: str) -> TrainStage:
        files = {f"train.lora.{name}": str(file) for name in names}
        return TrainStage(load_recipe("digits", lora | files), latents, base, None)

    keys = set[str]()
    for factor in (1.0, 2.0):
        write(factor)
        keys |= {stage(*names).parts.key for names in ((), ("start",), ("assistant",))}
    assert len(keys) == 5, "content counts, and what it is for"
    jobs: list[TrainJob] = []

    def started(job: TrainJob, *_: Any, **__: Any) -> None:
        for url in (job.adapters, job.assistant):
            assert url is not None
            assert all((adapter.up == 2).all() for adapter in read_scaled(url)["unet"].values())
        jobs.append(job)
        raise Failed("enough")

    monkeypatch.setattr(train, "run_job", started)
    monkeypatch.setattr(train, "open_latents", lambda url: SimpleNamespace(training=4))
    both = stage("start", "assistant")
    with pytest.raises(Failed, match="enough"):
        both.build(store.draft(both.parts), Progress("train"))
    assert jobs
