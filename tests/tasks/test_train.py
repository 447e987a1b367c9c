"""The train stage: its events."""

import io
import logging
from pathlib import Path

import fsspec
import numpy as np
import pytest
from PIL import Image

from tasks.progress import Progress
from tasks.train import _Watch

LINES = [{"step": n, "loss": 1.0 / n, "learning_rate": 1e-3} for n in range(1, 9)]


def _brightness(strip: bytes) -> dict[str, float]:
    return {"brightness": float(np.asarray(Image.open(io.BytesIO(strip))).mean())}


def test_a_rollback_discards_later_progress(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = _Watch(Progress("train"), fsspec.filesystem("memory"), _brightness)
    figures = {"images_per_second": 1.0, "data_wait": 0.0, "memory_bytes": 1, "eta_seconds": 1.0}
    with caplog.at_level(logging.INFO, "kiln"):
        for line in LINES:
            work = {"tflops": 0.5, "mfu": None}
            watch({"event": "progress", "total": 8, **line, **figures, **work})
        watch({"event": "validation", "step": 8, "loss": 0.25, "error": None})
        watch({"event": "back", "step": 5, "left_out": 6})
    assert [line["step"] for line in watch.history] == [1, 2, 3, 4, 5]
    assert watch.facts["tflops"] == 0.5 and watch.facts["mfu"] is None
    assert "held-out loss 0.2500 at step 8" in caplog.text


def test_new_samples_are_scored_at_once_and_earlier_ones_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fs = fsspec.filesystem("file")
    for step, value in ((2, 10), (4, 20), (6, 30)):
        Image.new("RGB", (4, 4), (value,) * 3).save(tmp_path / f"step-{step:08d}.png")
    watch = _Watch(Progress("train"), fs, _brightness)
    with caplog.at_level(logging.INFO, "kiln"):
        for step in (4, 6):
            path = str(tmp_path / f"step-{step:08d}.png")
            watch({"event": "sample", "step": step, "path": path})
        assert watch.scores == {4: {"brightness": 20.0}, 6: {"brightness": 30.0}}
        assert "samples of step 6: brightness 30" in caplog.text
        watch({"event": "back", "step": 5, "left_out": 6})
        assert list(watch.scores) == [4]
        (tmp_path / "step-00000006.png").write_bytes(b"torn")
        assert watch.all_scores(str(tmp_path)) == [
            {"step": 2, "brightness": 10.0},
            {"step": 4, "brightness": 20.0},
        ]
    assert "no scores of the pictures at step 6" in caplog.text  # and the run goes on
