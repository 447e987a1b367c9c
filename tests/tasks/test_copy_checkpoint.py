"""A run with more steps continues a finished run of the same settings."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from store_servers import REMOTE, UrlOf
from toy_recipes import base_of

from artifacts.store import Artifact, KeyParts, Store
from configs.errors import Failed
from configs.load_recipe import load_recipe
from configs.settings.train import Train
from runtimes.process.job import TrainJob
from runtimes.train.checkpoints import Checkpoints
from tasks import train
from tasks.progress import Progress
from tasks.train import copy_checkpoint


def parts_of(steps: int, **settings: Any) -> KeyParts:
    length = {} if "epochs" in settings else {"steps": steps}
    given = Train(**length, **{"lr_scheduler": "constant", **settings})
    return KeyParts("train", 1, given.key_settings(), {"latents": "0" * 64})


def finished_run(
    store: Store, parts: KeyParts, *steps: int, losses: Mapping[int, float] | None = None
) -> None:
    """A committed run with checkpoints of some steps, and held-out losses of some steps."""
    draft = store.draft(parts)
    known = {step: {"validation_loss": loss} for step, loss in (losses or {}).items()}
    for step in steps:
        arrays = {"unet.weight": np.full((3, 4), step, np.float32)}
        history = [json.dumps(known.get(n, {})) for n in range(1, step + 1)]
        Checkpoints(draft.uri, 9).save(step, {"weights": arrays}, history, {"seed": 1})
    draft.write("history.jsonl", b"")
    draft.commit({}, {})


def continued(store: Store, parts: KeyParts, train: Train = Train(steps=12)) -> list[int]:  # noqa: B008
    """The steps of the checkpoints that a new run has before it begins."""
    draft = store.draft(parts)
    copy_checkpoint(draft, train)
    return Checkpoints(draft.uri, 9)._steps()


@pytest.mark.parametrize("kind", ["local", "memory", *REMOTE])
def test_more_steps_continue_a_finished_run(kind: str, url_of: UrlOf) -> None:
    store = Store(url_of(kind))
    finished_run(store, parts_of(6), 2, 5)
    finished_run(store, parts_of(8), 7)
    finished_run(store, parts_of(20), 15)
    finished_run(store, parts_of(9, seed=4), 9)
    draft = store.draft(parts_of(12))
    copy_checkpoint(draft, Train(steps=12))
    assert Checkpoints(draft.uri, 9)._steps() == [7]
    saved = Checkpoints(draft.uri, 9).latest()
    assert saved is not None and saved.step == 7 and len(saved.history) == 7
    assert (saved.state["weights"]["unet.weight"][...] == 7).all()
    finished_run(store, parts_of(11), 10)
    copy_checkpoint(draft, Train(steps=12))
    assert Checkpoints(draft.uri, 9)._steps() == [7], "a run continues from its own checkpoint"


def test_a_copy_beside_a_checkpoint_is_none(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    finished_run(store, parts_of(8), 7)
    (saved,) = tmp_path.glob("train/*/checkpoints/step-00000007")
    for name in ("step-00000007-copy", "step-old-9"):
        shutil.copytree(saved, saved.with_name(name))
    assert continued(store, parts_of(12)) == [7]


RULE = {"best_checkpoint": {}, "checkpointing_steps": 2, "holdout_loss": {"every_n_steps": 2}}


def test_the_best_checkpoint_is_copied_before_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, losses = Store(str(tmp_path)), {2: 0.5, 4: 0.2, 6: 0.3, 8: 0.4}
    finished_run(store, parts_of(8, **RULE), 4, 6, 8, losses=losses)
    draft, copied, copy = store.draft(parts_of(12, **RULE)), list[str](), type(store.fs).cp_file

    def recorded(fs: Any, path: str, target: str, **more: Any) -> None:
        copied.append(path.split("/")[-2])
        copy(fs, path, target, **more)

    monkeypatch.setattr(type(store.fs), "cp_file", recorded)
    copy_checkpoint(draft, Train(steps=12, **RULE))
    assert list(dict.fromkeys(copied)) == ["step-00000004", "step-00000008"]


def test_a_checkpoint_whose_best_one_is_deleted_is_not_continued(tmp_path: Path) -> None:
    store, losses = Store(str(tmp_path)), {2: 0.1, 4: 0.3, 6: 0.2, 8: 0.05}
    finished_run(store, parts_of(8, **RULE), 6, 8, losses=losses)
    shorter, longer = (
        continued(store, parts_of(n, **RULE), Train(steps=n, **RULE)) for n in (7, 12)
    )
    assert shorter == [], "step 2 was the best until step 6"
    assert longer == [8]


@pytest.mark.parametrize("damage", [b'{"step":\n', None])
def test_a_checkpoint_with_a_damaged_history_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes | None
) -> None:
    store, losses = Store(str(tmp_path)), {2: 0.1, 4: 0.3}
    finished_run(store, parts_of(4, **RULE), 2, 4, losses=losses)
    (history,) = tmp_path.glob("train/*/checkpoints/step-00000004/history.jsonl")
    if damage is None:
        history.unlink()
    else:
        history.write_bytes(damage * 4)  # a line per step
    assert continued(store, parts_of(12, **RULE), Train(steps=12, **RULE)) == [2]
    assert "step-00000004 is skipped" in caplog.text


def test_epochs_continue_a_run_of_fewer_epochs(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    finished_run(store, parts_of(1000, epochs=1), 5)
    assert continued(store, parts_of(1000, epochs=2)) == [5]


def test_other_runs_are_not_continued(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    finished_run(store, parts_of(6), 5)
    other = KeyParts("train", 1, parts_of(12).settings, {"latents": "1" * 64})
    for parts in (other, parts_of(12, learning_rate=0.5), parts_of(12, lr_scheduler="cosine")):
        assert continued(store, parts) == []


@pytest.mark.parametrize(
    ("changed", "steps"),
    [
        ({}, [5]),
        ({"lr_scheduler": "cosine"}, []),  # the learning rate of a step depends on their number
        ({"ema_every_n_steps": 4}, []),  # the finished run's last step updated its average
    ],
)
def test_the_stage_copies_it_where_weights_do_not_depend_on_the_number_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], steps: list[int]
) -> None:
    settings = {"lr_scheduler": "constant", "ema_decay": 0.9, **changed}
    store = Store(str(tmp_path))
    finished_run(store, parts_of(6, **settings), 5)
    draft = store.draft(parts_of(12, **settings))

    def started(job: TrainJob, *_: Any, **__: Any) -> None:
        assert job.train["steps"] == 12 and Checkpoints(job.work, 9)._steps() == steps
        raise Failed("enough")

    monkeypatch.setattr(train, "run_job", started)
    monkeypatch.setattr(train, "open_latents", lambda url: SimpleNamespace(training=4))
    given = {"steps": 12, **settings}
    recipe = load_recipe("digits", {f"train.{name}": value for name, value in given.items()})
    latents = Artifact(store, "encode", "0" * 64, {})
    with pytest.raises(Failed, match="enough"):
        train.TrainStage(recipe, latents, base_of(recipe), None).build(draft, Progress("train"))


def test_a_copied_checkpoint_counts_once_its_manifest_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(str(tmp_path))
    finished_run(store, parts_of(6), 5)
    draft = store.draft(parts_of(12))
    copy, copied = type(store.fs).cp_file, list[str]()

    def killed(fs: Any, path: str, target: str, **more: Any) -> None:
        if len(copied) == 2:
            raise OSError("killed")
        copied.append(path)
        copy(fs, path, target, **more)

    with monkeypatch.context() as patch:
        patch.setattr(type(store.fs), "cp_file", killed)
        with pytest.raises(OSError, match="killed"):
            copy_checkpoint(draft, Train(steps=12))
    assert Checkpoints(draft.uri, 9)._steps() == []
    copy_checkpoint(draft, Train(steps=12))
    assert Checkpoints(draft.uri, 9)._steps() == [5]


def test_a_checkpoint_that_gc_deletes_meanwhile_starts_the_run_at_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(str(tmp_path))
    finished_run(store, parts_of(6), 5)
    draft, copy = store.draft(parts_of(12)), type(store.fs).cp_file

    def deleted(fs: Any, path: str, target: str, **more: Any) -> None:
        if fs.exists(folder := path.rpartition("/")[0]):
            copy(fs, path, target, **more)
            fs.rm(folder, recursive=True)
            return
        copy(fs, path, target, **more)

    monkeypatch.setattr(type(store.fs), "cp_file", deleted)
    copy_checkpoint(draft, Train(steps=12))
    assert Checkpoints(draft.uri, 9).latest() is None
