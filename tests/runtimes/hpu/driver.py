"""Do a train job, watched: the driver of test_hpu.py, in a process of an emulated Gaudi host.

`driver.py JOB.json [WARM_UP]` prints what had been compiled before and after each step, and how
often the host waited between them. From step WARM_UP on, nothing new may be compiled.
"""

import json
import sys
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from runtimes.base import StepBatch, StepOutput
from runtimes.events import Events
from runtimes.job import read_job
from runtimes.registry import prepare
from runtimes.stop import Stop
from runtimes.train.loop import train

SYNCS = ("to_host", "numbers_read")


class Watched(Events):
    """Keeps the figures of progress."""

    figures: list[dict[str, Any]]

    def __init__(self) -> None:
        super().__init__()
        self.figures = []

    def emit(self, event: str, **fields: Any) -> None:
        if event == "progress":
            self.figures.append(fields)
        super().emit(event, **fields)


def main(path: str, warm_up: int) -> None:
    job = read_job(Path(path))
    prepare(job)
    from hpu_emulator import build, graphs, watch

    from runtimes.torch.runtime import TheRuntime

    step, syncs = TheRuntime.step, list[int]()
    compiled = list[int]()

    def watched(self: TheRuntime, batch: StepBatch, learning_rate: float) -> StepOutput:
        counts = build.load().counts()
        syncs.append(sum(counts[name] for name in SYNCS))
        if not compiled:
            compiled.append(graphs.compiled())
        with ExitStack() as stack:
            stack.enter_context(watch.no_host_syncs())
            if batch.step >= warm_up:
                stack.enter_context(watch.no_new_graphs())
            if self._settings.compute_dtype == "bfloat16":
                stack.enter_context(watch.casts("BFloat16"))
            output = step(self, batch, learning_rate)
        compiled.append(graphs.compiled())
        return output

    TheRuntime.step = watched  # type: ignore[method-assign]
    events = Watched()
    train(job, events, Stop())
    between = [after - before for before, after in pairwise(syncs)]
    told = {"compiled": compiled, "recorded": len(graphs.recorded), "syncs": between}
    told |= {"figures": events.figures}
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 2**31)
