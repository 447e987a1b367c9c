"""Functions that test_mindspore.py calls in the environment of runtime mindspore."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import mindspore as ms
import numpy as np
import training
from numpy.typing import NDArray

from configs.errors import Refused
from configs.settings.train import Train
from runtimes.data.loader import open_job_latents
from runtimes.mindspore.device import check, start
from runtimes.mindspore.load_diffusers_weights import load_vae
from runtimes.mindspore.runtime import TheRuntime
from runtimes.mindspore.sampler import (
    Sampler,
    ThePipeline,
    load_network,
    make_scheduler,
    open_encoder,
)
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import Drawing, EncodeJob, GenerateJob, TrainJob
from runtimes.train.training_loop import make_batches


def train(job: dict[str, Any]) -> int:
    """Train to the end; the step it began at."""
    return training.train(TrainJob(**job))


def draw(model: str, folder: str, given: dict[str, Any]) -> dict[str, str]:
    """Draw pictures by each of some schedulers into `folder/<scheduler>.npy`, as floats.

    Args:
        given: `schedulers`, their `config`, `prompts`, `sampler`.

    Returns:
        What those say that cannot draw here.
    """
    start("cpu")  # in the fork: what MindSpore starts with it does not outlive one
    network = load_network(Drawing(folder), Base.open(Path(model)), ms.float32)
    sampler, wrong = Sampler(Base.open(Path(model)), network.parts, ms.float32), {}
    for name in given["schedulers"]:
        sampler.use(None, make_scheduler({**given["config"], "_class_name": name}))
        try:
            drawn = list(sampler.draw_floats(given["prompts"], given["sampler"], first=0))
        except Refused as error:
            wrong[name] = str(error)
        else:
            np.save(f"{folder}/{name}.npy", np.concatenate(drawn))
    return wrong


def left_after_sampling(job: dict[str, Any]) -> list[bool]:
    """Whether VAE and text encoders exist, while pictures are sampled and afterwards."""
    models, found = list[Any](), list[bool]()

    def draw(sampler: Sampler, *_: Any, **__: Any) -> NDArray[np.uint8]:
        encoder = sampler._encoder
        models.extend(map(ref, (encoder.vae, *encoder.text_encoders.values())))
        found.append(all(model() is not None for model in models))
        return np.zeros((1, 8, 8, 3), np.uint8)

    runtime = _loaded(TrainJob(**job))
    Sampler.draw = draw
    runtime.sample(["a"], {})
    return [*found, any(model() is not None for model in models)]


def wrong(jobs: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the settings of each."""
    return [_said(partial(check, Train(**job["train"]))) for job in jobs]


def counted(given: dict[str, Any]) -> tuple[int, list[float]]:
    """Times that an activation of the network is computed in the job's steps, and their losses."""
    job = TrainJob(**given)
    runtime, settings = _loaded(job), Train(**job.train)
    cells = (cell for _, cell in runtime._network.cells_and_names())
    watched = next(c for c in cells if type(c).__name__ == "ResnetBlock2D").nonlinearity
    kind = type(watched)
    calls, construct = list[Any](), kind.construct

    def watching(self: Any, given: ms.Tensor) -> ms.Tensor:
        calls.extend([self] if self is watched else [])
        return construct(self, given)

    kind.construct = watching
    loader, _ = make_batches(job, Base.of(job), settings, open_job_latents(job.latents))
    batch = loader.batch
    losses = [float(runtime.step(batch(n), 1e-3).loss) for n in range(settings.steps)]
    return len(calls), losses


def without_numbers(job: dict[str, Any]) -> tuple[bool, float]:
    """Whether a first step whose gradients are no numbers is skipped, and their norm."""
    update = _loaded(TrainJob(**job))._update
    gradients = [ms.Tensor(np.full(p.shape, np.nan, np.float16)) for p in update._masters.values()]
    norm, skipped = update.apply(gradients, 1e-3)
    return skipped, float(norm)


def attention_casts(model: str) -> list[Any]:
    """What attention in a float32 VAE is cast to."""
    start("cpu")
    cells = [cell for _, cell in load_vae(Path(model) / "vae").cells_and_names()]
    return list({cell.fa_force_dtype for cell in cells if hasattr(cell, "fa_force_dtype")})


def fresh(job: dict[str, Any]) -> float:
    """The sum of the size of all weights that it starts with."""
    weights = _loaded(TrainJob(**job))._network.trained().values()
    return float(sum(np.abs(p.asnumpy()).sum() for p in weights))


def _loaded(job: TrainJob) -> TheRuntime:
    runtime = TheRuntime()
    runtime.load(job, Base.of(job))
    return runtime


def refused(model: str) -> dict[str, str]:
    """What is said of a precision that the CPU does not have, by what encodes and what draws."""
    encode = EncodeJob("mindspore", model, device="cpu", dtype="bfloat16")
    generate = GenerateJob("mindspore", model, (), ("a",), {}, "cpu", "bfloat16")
    asked = {
        "encode": lambda: open_encoder(encode),
        "generate": lambda: ThePipeline(generate, Base.of(generate)),
    }
    return {name: _said(ask) for name, ask in asked.items()}


def _said(ask: Callable[[], Any]) -> str:
    """Its complaint; nothing if it has none."""
    try:
        ask()
    except Refused as error:
        return str(error)
    return ""
