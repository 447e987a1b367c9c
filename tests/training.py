"""Train in the test's process, and read the outputs of a run."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from runtimes.process.events import Events
from runtimes.process.job import TrainJob
from runtimes.process.signals import Stop
from runtimes.train import training_loop


class RecordedEvents(Events):
    """Records the events of a job."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[dict[str, Any]] = []

    def emit(self, event: str, **fields: Any) -> None:
        self.recorded.append({"event": event, **fields})
        super().emit(event, **fields)

    def all(self, event: str) -> list[dict[str, Any]]:
        return [record for record in self.recorded if record["event"] == event]


def train(job: TrainJob, events: RecordedEvents | None = None) -> int:
    """Train to the end; the first step."""
    events = events or RecordedEvents()
    assert training_loop.train(job, events, Stop())
    (start,) = events.all("start")
    return int(start["step"])


def history(job: TrainJob) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(job.out) / "history.jsonl").read_text().splitlines()]


def losses(job: TrainJob) -> list[float]:
    return [line["loss"] for line in history(job)]


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
