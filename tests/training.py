"""Train in the test's process, and read the outputs of a run."""

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

from runtimes.process.job import Events, TrainJob
from runtimes.process.launcher import Stop
from runtimes.train import training_loop
from runtimes.train.checkpoints import Checkpoints


class RecordedEvents(Events):
    """Keeps the events of a job, and asks it to stop at an event of a step, or of a later one.

    Attributes:
        events: (kind, fields) of each, as they are read from JSON.
        stop: for the job.
    """

    def __init__(self, until: tuple[str, float] = ("", math.inf)) -> None:
        super().__init__()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.stop, self._until = Stop(), until

    def emit(self, event: str, **fields: Any) -> None:
        self.events.append((event, json.loads(json.dumps(fields))))
        kind, step = self._until
        if event == kind and fields["step"] >= step:
            self.stop.requested = True
        super().emit(event, **fields)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.events if event == kind]


def train(job: TrainJob, events: RecordedEvents | None = None) -> int:
    """Train to the end; the first step."""
    events = events or RecordedEvents()
    assert training_loop.train(job, events, events.stop)
    (start,) = events.of("start")
    return int(start["step"])


def newest(checkpoints: Checkpoints) -> int | None:
    """The step of the newest checkpoint that is whole."""
    saved = checkpoints.latest()
    return None if saved is None else saved.step


def history(job: TrainJob) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(job.out) / "history.jsonl").read_text().splitlines()]


def losses(job: TrainJob) -> list[float]:
    return [line["loss"] for line in history(job)]


def norms(job: TrainJob) -> list[float]:
    return [line["grad_norm"] for line in history(job)]


def weights(job: TrainJob) -> dict[str, bytes]:
    """Contents of the weight files of a job, by path relative to its output."""
    out = Path(job.out)
    found = sorted([*out.glob("*.safetensors"), *out.glob("*/*.safetensors")])
    return {str(path.relative_to(out)): path.read_bytes() for path in found}


def results(job: TrainJob) -> list[Any]:
    """The history of a run, and the sha256 of each weight file."""
    files = weights(job).items()
    return [history(job), {name: hashlib.sha256(data).hexdigest() for name, data in files}]


def roll_back(job: TrainJob, step: int) -> None:
    """Restore the folders as if the job had been killed after the checkpoint of a step."""
    for path in (Path(job.work) / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    (Path(job.out) / "history.jsonl").unlink()
    for name in weights(job):
        (Path(job.out) / name).unlink()
