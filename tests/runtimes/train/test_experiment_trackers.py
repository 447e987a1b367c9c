"""TensorBoard itself reads our event files; whatever happened, each step is there once."""

import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import wandb
from fsspec.implementations.memory import MemoryFileSystem
from picture_bytes import encode_picture
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from configs.errors import Refused
from configs.settings.train import Train
from configs.settings.train_parts import Wandb
from runtimes.train.trackers import TensorBoard, Trackers, WandbTracker, check_wandb, open_trackers

pytestmark = pytest.mark.slow


def png() -> bytes:
    return encode_picture(Image.fromarray(np.zeros((3, 7, 3), np.uint8)))


def curve(folder: Path, name: str = "loss") -> list[tuple[int, float]]:
    """What TensorBoard shows of a curve."""
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    accumulator.Reload()
    return [(event.step, round(event.value, 6)) for event in accumulator.Scalars(name)]


def fetch(url: str, folder: Path) -> Path:
    """A local copy of what is at `url`."""
    fs, root = fsspec.url_to_fs(url)
    folder.mkdir()
    for path in fs.find(root):
        (folder / path.rpartition("/")[2]).write_bytes(fs.cat_file(path))
    return folder


def draw(tracker: TensorBoard, steps: range, by: float = 1.0) -> None:
    for step in steps:
        tracker.scalars(step, {"loss": step * by})
        if step % 4 == 0:
            tracker.picture(step, "samples", png())
            tracker.flush()


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_each_step_is_there_once_after_a_resume_and_a_rewind(tmp_path: Path, kind: str) -> None:
    (tmp_path := tmp_path / "run[1]").mkdir()
    work = str(tmp_path) if kind == "local" else f"memory://{tmp_path.name}"
    killed = TensorBoard(work)
    killed.rewind(0)
    draw(killed, range(1, 10))
    resumed = TensorBoard(work)
    resumed.rewind(5)
    draw(resumed, range(6, 12), by=2.0)
    resumed.rewind(9)
    draw(resumed, range(10, 14), by=3.0)
    resumed.close(True)
    folder = tmp_path / "tensorboard"
    if kind == "memory":
        folder = fetch(f"{work}/tensorboard", folder)
    expected = [(s, float(s)) for s in range(1, 6)]
    expected += [(s, 2.0 * s) for s in range(6, 10)] + [(s, 3.0 * s) for s in range(10, 14)]
    assert curve(folder) == expected
    accumulator = EventAccumulator(str(folder), size_guidance={"images": 0})
    accumulator.Reload()
    pictures = accumulator.Images("samples")
    assert [picture.step for picture in pictures] == [4, 8, 12]
    assert (pictures[0].width, pictures[0].height) == (7, 3)
    assert pictures[0].encoded_image_string == png()


def test_what_a_store_did_not_accept_is_written_at_the_next_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = f"memory://{tmp_path.name}"
    trackers = Trackers([TensorBoard(work)])

    def away(*_: Any, **__: Any) -> None:
        raise OSError("the store is away")

    for step in (1, 2, 3):
        trackers.scalars(step, {"loss": float(step)})
        with monkeypatch.context() as patched:
            if step == 2:
                patched.setattr(MemoryFileSystem, "pipe_file", away)
            trackers.flush()
    assert curve(fetch(f"{work}/tensorboard", tmp_path / "a")) == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_an_event_that_was_cut_short_costs_nothing_else(tmp_path: Path) -> None:
    tracker = TensorBoard(str(tmp_path))
    draw(tracker, range(1, 4))
    (path,) = (tmp_path / "tensorboard").iterdir()
    os.truncate(path, path.stat().st_size - 7)
    resumed = TensorBoard(str(tmp_path))
    resumed.rewind(2)
    draw(resumed, range(3, 5))
    assert curve(tmp_path / "tensorboard") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]


def test_a_board_that_fails_is_given_up_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing, fine = TensorBoard(str(tmp_path / "a")), TensorBoard(str(tmp_path / "b"))
    trackers = Trackers([failing, fine])
    (tmp_path / "a/tensorboard").rmdir()
    with caplog.at_level(logging.WARNING, "kiln"):
        for step in (1, 2):
            trackers.scalars(step, {"loss": 1.0, "mfu": None})
        trackers.close(True)
    assert [record.message[:24] for record in caplog.records] == ["TensorBoard is given up:"]
    assert curve(tmp_path / "b/tensorboard") == [(1, 1.0), (2, 1.0)]


def test_weights_and_biases_needs_a_key_unless_it_is_offline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    check_wandb(None)
    check_wandb(Wandb(project="p", mode="offline"))
    with pytest.raises(Refused, match=r"train\.wandb needs a key in .* WANDB_API_KEY"):
        check_wandb(Wandb(project="p"))
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    check_wandb(Wandb(project="p"))


@pytest.mark.parametrize("error", [wandb.errors.UsageError("no project"), OSError("no network")])
def test_a_refusal_of_weights_and_biases_leaves_no_temporary_folder(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**given: Any) -> None:
        assert list(tmp_path.iterdir()) == [Path(given["dir"])]
        raise error

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(wandb, "init", refuse)
    refused = OSError if isinstance(error, OSError) else Refused
    with pytest.raises(refused, match=str(error)):
        WandbTracker(Wandb(project="p"), f"memory://{tmp_path.name}", {})
    assert list(tmp_path.iterdir()) == []


def test_weights_and_biases_go_on_with_the_same_run(tmp_path: Path) -> None:
    settings = Train(wandb=Wandb(project="p", mode="offline"))
    for steps in (range(1, 4), range(3, 6)):
        trackers = open_trackers(str(tmp_path), settings)
        trackers.rewind(steps[0] - 1)
        for step in steps:
            trackers.scalars(step, {"loss": 1.0 / step})
        trackers.picture(steps[-1], "samples", png())
        trackers.close(True)
    runs = [path for path in (tmp_path / "wandb").glob("offline-run-*") if path.is_dir()]
    assert len({path.name.rpartition("-")[2] for path in runs}) == 1
    assert [len(list(path.glob("*.wandb"))) for path in runs] == [1] * len(runs)
    pictures = [path for run in runs for path in run.glob("files/media/images/samples_*.png")]
    assert sorted(path.name.split("_")[1] for path in pictures) == ["3", "5"]
