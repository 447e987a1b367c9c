"""What is reported counts training alone: pauses are left out, and a run's rate is of all steps."""

import json
import time
from typing import Any, cast

import numpy as np
import pytest
from training import RecordedEvents

from configs.settings.train import Train
from runtimes.contract import Runtime, StepBatch, StepOutput
from runtimes.train.history import Recorder
from runtimes.train.trackers import Trackers


class Idle:
    """Takes no time, and counts 3e9 FLOP a sample."""

    def __init__(self) -> None:
        self.counted: list[int] = []

    def memory_bytes(self) -> int:
        return 0

    def peak_flops(self) -> float | None:
        return None

    def figures(self) -> dict[str, float]:
        return {}

    def flops(self, batch: StepBatch) -> float | None:
        assert batch.on_device is None, "a batch that waits to be counted uses no device memory"
        self.counted.append(len(batch.timesteps))
        return 3e9 * len(batch.timesteps)


def batch(size: int = 8) -> StepBatch:
    array = np.zeros((size, 4, 2, 2), np.float32)
    weight, timesteps = np.zeros(size, np.float32), np.zeros(size, np.int32)
    conditioning = {"prompt_embeds": array}
    return StepBatch(0, array, timesteps, array, weight, conditioning, size, on_device="its arrays")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    return clock


def make(runtime: Idle, heard: RecordedEvents, **more: Any) -> Recorder:
    settings = Train(**{"steps": 9, "global_batch_size": 8, **more})
    return Recorder(settings, cast(Runtime, runtime), Trackers([]), heard)


def test_the_rate_of_the_run_is_of_all_its_steps(now: list[float]) -> None:
    heard = RecordedEvents()
    recorder = make(Idle(), heard, steps=6)
    recorder.begin([json.dumps({"step": step}) for step in (1, 2)])  # resumed after two
    for seconds, paused in ((1.0, 0.0), (1.0, 5.0), (3.0, 0.0), (3.0, 7.0)):
        recorder.add(batch(), StepOutput(0.5, 0.5), 1e-3)
        now[0] += seconds
        since = now[0]
        now[0] += paused
        recorder.throughput.exclude_since(since)
        if paused:
            recorder.synchronize()
            recorder.report(0.0)
    rates = [event["images_per_second"] for event in heard.of("progress")]
    assert rates == pytest.approx([2 * 8 / 2.0, 2 * 8 / 6.0])
    assert recorder.throughput.images_per_second == pytest.approx(4 * 8 / 8.0)


def test_flops_are_counted_once_per_shape_and_reported_for_completed_steps(
    now: list[float],
) -> None:
    heard, runtime = RecordedEvents(), Idle()
    recorder = make(runtime, heard, peak_tflops=0.096)
    for sizes, seconds in (((8, 8), 2.0), ((8, 4), 1.0)):
        for size in sizes:
            recorder.add(batch(size), StepOutput(0.5, 0.5), 1e-3)
        now[0] += seconds
        recorder.synchronize()
        recorder.report(0.0)
    assert runtime.counted == [8, 4]
    assert [event["tflops"] for event in heard.of("progress")] == pytest.approx([0.024, 0.036])
    assert [event["mfu"] for event in heard.of("progress")] == pytest.approx([0.25, 0.375])


def test_what_is_not_known_is_null(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    for flops in (None, 3e9):
        monkeypatch.setattr(Idle, "flops", lambda self, batch, flops=flops: flops)
        heard = RecordedEvents()
        recorder = make(Idle(), heard)
        recorder.add(batch(), StepOutput(0.5, 0.5), 1e-3)
        now[0] += 1.0
        recorder.synchronize()
        recorder.report(0.0)
        assert heard.of("progress")[0]["mfu"] is None
        assert heard.of("progress")[0]["tflops"] == (None if flops is None else 0.003)
