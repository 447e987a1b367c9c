"""Settings that tests of jobs share, and a runtime that has trained for a few steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from configs.training import Train
from runtimes.contract import StepBatch
from runtimes.data.loader import open_job_latents
from runtimes.models.micro_batches import Inputs, sender
from runtimes.models.network import Network
from runtimes.process.events import Events
from runtimes.process.job import TrainJob
from runtimes.torch.runtime import TheRuntime
from runtimes.train.trainer import make_loader

MakeJob = Callable[..., TrainJob]  # of runtimes/conftest.py
CPU = torch.device("cpu")
#: A run with a bit of everything that a resume must not disturb.
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
HOLDOUT = {"samples": 4, "draws": 2, "seed": 1, "noise_offset": 0.0}
ADAPTERS = {"rank": 3, "alpha": 5.0, "target_modules": "all"}


def lora(**settings: Any) -> dict[str, Any]:
    """Train settings of adapters on all layers, but for those given."""
    return {"method": "lora", "lora": {**ADAPTERS, **settings}, "learning_rate": 1e-2}


def start(job: TrainJob) -> tuple[TheRuntime, Callable[[int], StepBatch]]:
    """A loaded runtime, and its loader's batches by step."""
    runtime = TheRuntime(Events())
    runtime.load(job)
    return runtime, make_loader(job, Train(**job.train), open_job_latents(job.latents)).batch


def trained(job: TrainJob, steps: int = 3, rate: float = 3e-2) -> tuple[TheRuntime, StepBatch]:
    """Adapters far enough from the base to tell them apart, and a batch not trained on."""
    runtime, batch = start(job)
    for step in range(steps):
        runtime.step(batch(step), rate)
    return runtime, batch(steps)


def predicted(network: Network, batch: StepBatch) -> torch.Tensor:
    """What a network predicts for a batch [B, C, h, w]."""
    network.eval()
    given = Inputs(batch, sender(CPU))
    with torch.inference_mode():
        return network(given.noisy_latents, given.timesteps, given.conditioning)


def curve(job: TrainJob, name: str) -> list[int]:
    """The steps that TensorBoard shows of a curve."""
    from tensorboard.backend.event_processing import event_accumulator  # which drivers lack

    accumulator = event_accumulator.EventAccumulator(f"{job.work}/tensorboard")
    accumulator.Reload()
    return [event.step for event in accumulator.Scalars(name)]


def outputs(job: TrainJob) -> dict[str, bytes]:
    """The files that a job has left, by path below its output."""
    out = Path(job.out)
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}
