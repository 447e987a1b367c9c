"""Run in the environment of runtime xla: a train job in this process, and what XLA counted.

    python train_driver.py JOB.json           the job, whole
    python train_driver.py JOB.json STEP      then again from the checkpoint of that step

Prints one JSON object.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch_xla
from torch_xla.debug import metrics

from runtimes.base import StepBatch, StepOutput
from runtimes.events import Events
from runtimes.job import TrainJob, read_job
from runtimes.stop import Stop
from runtimes.train import loop
from runtimes.xla.runtime import TheRuntime


def compiles() -> int:
    """Of every kind: steps, and programs that bring arrays together."""
    found = metrics.metric_data("CompileTime")  # (times, ...)
    return 0 if found is None else int(found[0])


class Counting(TheRuntime):
    """Counts the compilations of each step; `made` are those that were opened."""

    made: ClassVar[list["Counting"]] = []

    def __init__(self, events: Events) -> None:
        super().__init__(events)
        self.by_step: list[int] = []
        self.made.append(self)

    def step(self, batch: StepBatch, learning_rate: float) -> StepOutput:
        before = compiles()
        output = super().step(batch, learning_rate)
        self.by_step.append(compiles() - before)
        return output

    def shared(self) -> list[str]:
        """Which arrays of the state lie in parts on several devices: `<group> <name>`."""
        spec = torch_xla._XLAC._get_xla_sharding_spec
        return [
            f"{group} {name}"
            for group, arrays in self._update.tensors().items()
            for name, array in arrays.items()
            if "devices=[" in spec(array)
        ]


def forget_after(job: TrainJob, step: int) -> None:
    for path in (Path(job.work) / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


def main(path: str, *again: str) -> dict[str, Any]:
    job = read_job(Path(path))
    assert isinstance(job, TrainJob)
    loop.open_runtime = lambda name, events: Counting(events)  # type: ignore[assignment]
    loop.train(job, Events(), Stop())
    first = compiles()
    for step in again:
        forget_after(job, int(step))
        loop.train(job, Events(), Stop())
    names = metrics.counter_names()
    return {
        "by_step": [runtime.by_step for runtime in Counting.made],
        "compiles": [first, compiles() - first],
        "fallbacks": [name for name in names if name.startswith("aten::")],
        "cache": {n: metrics.counter_value(n) for n in names if n.startswith("PersistentCache")},
        "shared": Counting.made[0].shared(),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
