"""Sample images and compute held-out losses by JAX, for a sequence of models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from numpy.typing import NDArray

from runtimes.contract import StepBatch
from runtimes.jax.batches import held_out_errors
from runtimes.jax.bridge import as_function
from runtimes.jax.device import compile_seconds, start
from runtimes.jax.mesh import Mesh
from runtimes.jax.sampler import Sampler, same_architecture
from runtimes.jax.step import Arrays, errors
from runtimes.jax.weights import frozen_arrays
from runtimes.models.network import Network
from runtimes.models.schedulers import make_scheduler
from runtimes.process.job import Drawing, GenerateJob
from runtimes.sample.generate_job import LOSS_BATCH
from runtimes.sample.network import load_network
from runtimes.sample.start import load_trained_scheduler


class ThePipeline:
    """Implements contract.Pipeline."""

    def __init__(self, job: GenerateJob) -> None:
        self._compile_cache = start(job.device, job.compiled, job.dtype)
        self._job = job
        self._mesh = Mesh(fsdp=1)
        self._sampler: Sampler | None = None
        self._network: Network | None = None

    def load(self, drawing: Drawing) -> None:
        self._arrays: Arrays = {}  # frees the previous model's memory before the next one is loaded
        half = getattr(torch, self._job.dtype)
        network = load_network(drawing, Path(self._job.model), half, torch.device("cpu"))
        self._arrays = frozen_arrays(network, self._mesh, half)
        self._scheduler = load_trained_scheduler(drawing, make_scheduler)
        self.encodes_text = bool(network.text_encoders)
        if self._network is None or not same_architecture(network, self._network):
            self._network = network
            predict = as_function(network, training=False)
            self._errors = jax.jit(partial(errors, predict))

    def draw(self, prompts: Sequence[str], first: int) -> NDArray[np.uint8]:
        job = self._job
        if self._sampler is None:
            vae = None if job.vae is None else Path(job.vae)
            self._sampler = Sampler(Path(job.model), self._mesh, job.dtype, vae)
        assert self._network is not None, "call `take` first"
        self._sampler.use(self._network, self._scheduler)
        drawn = self._sampler.draw(self._arrays, prompts, job.sampler, first=first)
        self._compile_cache.upload()
        return drawn

    def errors(self, batch: StepBatch) -> NDArray[np.float32]:
        rows = min(LOSS_BATCH, self._job.sampler["batch_size"])
        dtype = jnp.dtype(self._job.dtype)
        return held_out_errors(self._errors, self._arrays, batch, rows, self._mesh, dtype)

    def compile_seconds(self) -> float:
        return compile_seconds()
