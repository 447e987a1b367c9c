"""Rates count training alone: pauses are left out, and the run's rate is that of all its steps."""

import json
import time
from typing import Any, cast

import pytest

from runtimes.base import Runtime, StepOutput
from runtimes.events import Events
from runtimes.recorder import Recorder


class Heard(Events):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def emit(self, event: str, **fields: Any) -> None:
        self.rates.append(fields["images_per_second"])


class Idle:
    def memory_bytes(self) -> int:
        return 0


def test_the_rate_of_the_run_is_of_all_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    heard = Heard()
    before = [json.dumps({"step": step}) for step in (1, 2)]  # resumed after two
    recorder = Recorder(heard, cast(Runtime, Idle()), before, total=6, batch_size=8)
    for seconds, paused in ((1.0, 0.0), (1.0, 5.0), (3.0, 0.0), (3.0, 7.0)):
        recorder.add(StepOutput(0.5, 0.5), 1e-3)
        now[0] += seconds
        since = now[0]
        now[0] += paused
        recorder.pause(since)
        if len(heard.rates) < 1 and seconds == 1.0 and paused:
            recorder.report(0.0)
    recorder.report(0.0)
    assert heard.rates == pytest.approx([2 * 8 / 2.0, 2 * 8 / 6.0])
    assert recorder.images_per_second == pytest.approx(4 * 8 / 8.0)
