"""Run in the environment of runtime mindspore: `python inside_driver.py JOBS`.

JOBS is a JSON object: names of the functions here, with the train jobs that each is to be called
with, one after another. Prints what they find, in the same form.
"""

import json
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np

from configs.training import Train
from runtimes.base import WrongInput
from runtimes.events import Events
from runtimes.job import TrainJob
from runtimes.mindspore.device import check, start
from runtimes.mindspore.runtime import TheRuntime
from runtimes.train.loop import make_loader, open_job_latents


def wrong(job: TrainJob) -> str:
    """What is wrong with its settings."""
    try:
        check(Train(**job.train))
    except WrongInput as error:
        return str(error)
    return ""


def counted(job: TrainJob) -> tuple[int, list[float]]:
    """Times that an activation of the network is computed in the job's steps, and their losses."""
    runtime, settings = _loaded(job), Train(**job.train)
    cells = (cell for _, cell in runtime._network.cells_and_names())
    watched = next(c for c in cells if type(c).__name__ == "ResnetBlock2D").nonlinearity
    kind = type(watched)
    calls, construct = list[Any](), kind.construct

    def watching(self: Any, given: ms.Tensor) -> ms.Tensor:
        calls.extend([self] if self is watched else [])
        return construct(self, given)

    kind.construct = watching
    batch = make_loader(job, settings, open_job_latents(job.latents)).batch
    losses = [float(runtime.step(batch(n), 1e-3).loss) for n in range(settings.steps)]
    kind.construct = construct
    return len(calls), losses


def without_numbers(job: TrainJob) -> tuple[bool, float]:
    """Whether a first step whose gradients are no numbers is skipped, and their norm."""
    update = _loaded(job)._update
    gradients = [ms.Tensor(np.full(p.shape, np.nan, np.float16)) for p in update._masters.values()]
    norm, skipped = update.apply(gradients, 1e-3)
    return skipped, float(norm)


def attention_casts(job: TrainJob) -> list[Any]:
    """What attention in a float32 VAE is cast to."""
    start("cpu")
    from runtimes.mindspore.models import load_vae

    cells = [cell for _, cell in load_vae(Path(job.model) / "vae").cells_and_names()]
    return list({cell.fa_force_dtype for cell in cells if hasattr(cell, "fa_force_dtype")})


def fresh(job: TrainJob) -> float:
    """The sum of the size of all weights that it starts with."""
    weights = _loaded(job)._network.trained().values()
    return float(sum(np.abs(p.asnumpy()).sum() for p in weights))


def _loaded(job: TrainJob) -> TheRuntime:
    runtime = TheRuntime(Events())
    runtime.load(job)
    return runtime


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    found = {
        name: [globals()[name](TrainJob(**job)) for job in jobs] for name, jobs in given.items()
    }
    print(json.dumps(found))
