"""Shared settings of test jobs, and a runtime after a few training steps."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configs.settings.train import Train
from runtimes.contract import State, StepBatch
from runtimes.data.loader import Loader, open_job_latents
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import TrainJob
from runtimes.torch.runtime import TheRuntime
from runtimes.torch_models.activation_memory import Inputs, sender
from runtimes.torch_models.network import Network
from runtimes.train.training_loop import make_batches

MakeJob = Callable[..., TrainJob]  # of runtimes/conftest.py
CPU = torch.device("cpu")
#: A run with every feature whose state a resume must restore.
SETTINGS = {
    "steps": 60,
    "checkpointing_steps": 7,
    "logging_steps": 2,
    "ema_decay": 0.95,
    "snr_gamma": 5.0,
    "caption_dropout_rate": 0.2,
    "noise_offset": 0.05,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 5,
}
SAMPLER = {
    "seed": 7,
    "num_inference_steps": 2,
    "guidance_scale": 3.0,
    "height": None,
    "width": None,
    "batch_size": 2,
}
HOLDOUT = {"samples": 4, "levels": 2, "seed": 1, "noise_offset": 0.0}
ADAPTERS = {"rank": 3, "alpha": 5.0, "target_modules": "all"}


def lora(**settings: Any) -> dict[str, Any]:
    """Train settings of LoRA on all layers, with changes to section `lora`."""
    return {"method": "lora", "lora": {**ADAPTERS, **settings}, "learning_rate": 1e-2}


def start(job: TrainJob) -> tuple[TheRuntime, Callable[[int], StepBatch]]:
    """A loaded runtime, and a function from step to batch."""
    runtime = TheRuntime()
    runtime.load(job, Base.of(job))
    return runtime, loader_of(job).batch


def start_with_base(job: TrainJob) -> tuple[TheRuntime, Callable[[int], StepBatch]]:
    """As `start`, of a runtime that predicts prior targets; batches are of the job's one source."""
    runtime = TheRuntime()
    mixture = {"old": {"regularisation": "prior"}}
    runtime.load(replace(job, mixture=mixture), Base.of(job))
    return runtime, loader_of(job).batch


def loader_of(job: TrainJob) -> Loader:
    """The training batches of a job."""
    latents = open_job_latents(job.latents)
    return make_batches(job, Base.of(job), Train(**job.train), latents)[0]


def trained(job: TrainJob, steps: int = 3, rate: float = 3e-2) -> tuple[TheRuntime, StepBatch]:
    """A runtime after a few steps at a high learning rate, and the next batch."""
    runtime, batch = start(job)
    for step in range(steps):
        runtime.step(batch(step), rate)
    return runtime, batch(steps)


def predicted(network: Network, batch: StepBatch) -> torch.Tensor:
    """Prediction of a network for a batch, [B, C, h, w]."""
    network.eval()
    inputs = Inputs(batch, sender(CPU))
    with torch.inference_mode():
        return network(inputs.noisy_latents, inputs.timesteps, inputs.conditioning)


def curve(job: TrainJob, name: str) -> list[int]:
    """The steps of a scalar in the job's TensorBoard files."""
    from tensorboard.backend.event_processing import event_accumulator  # not installed for drivers

    accumulator = event_accumulator.EventAccumulator(f"{job.work}/tensorboard")
    accumulator.Reload()
    return [event.step for event in accumulator.Scalars(name)]


def outputs(job: TrainJob) -> dict[str, bytes]:
    """Contents of a job's output files, by relative path."""
    out = Path(job.out)
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}


def assert_equal(one: State, other: State) -> None:
    """The arrays of two states are equal to the bit."""
    assert one.keys() == other.keys()
    for group in one:
        np.testing.assert_equal(one[group], other[group])
