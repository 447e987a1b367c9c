"""Train in this process as a runtime's process does, and look at what a run has left."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from runtimes.process.events import Events
from runtimes.process.job import TrainJob
from runtimes.process.signals import Stop
from runtimes.train import trainer


class Heard(Events):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[dict[str, Any]] = []

    def emit(self, event: str, **fields: Any) -> None:
        self.said.append({"event": event, **fields})
        super().emit(event, **fields)

    def all(self, event: str) -> list[dict[str, Any]]:
        return [said for said in self.said if said["event"] == event]


def train(job: TrainJob, events: Heard | None = None) -> int:
    """Train to the end; the step it began at."""
    events = events or Heard()
    assert trainer.train(job, events, Stop())
    (start,) = events.all("start")
    return int(start["step"])


def history(job: TrainJob) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(job.out) / "history.jsonl").read_text().splitlines()]


def losses(job: TrainJob) -> list[float]:
    return [line["loss"] for line in history(job)]


def weights(job: TrainJob) -> dict[str, bytes]:
    """The files of weights that it has left, by path below its output."""
    out = Path(job.out)
    found = sorted([*out.glob("*.safetensors"), *out.glob("*/*.safetensors")])
    return {str(path.relative_to(out)): path.read_bytes() for path in found}


def left(job: TrainJob) -> list[Any]:
    """What a run has left: its history, and a digest of each file of weights."""
    files = weights(job).items()
    return [history(job), {name: hashlib.sha256(data).hexdigest() for name, data in files}]


def forget_after(job: TrainJob, step: int) -> None:
    """Leave its folders as they were when it was killed after the checkpoint of a step."""
    for path in (Path(job.work) / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    (Path(job.out) / "history.jsonl").unlink()
    for name in weights(job):
        (Path(job.out) / name).unlink()
