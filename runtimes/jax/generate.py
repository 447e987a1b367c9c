"""Sample images and compute held-out losses by JAX, for a sequence of models."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from numpy.typing import NDArray

from runtimes.contract import StepBatch
from runtimes.jax.clip_update_and_ema import Arrays
from runtimes.jax.device import compile_seconds, start
from runtimes.jax.mesh import Mesh
from runtimes.jax.micro_batches import held_out_errors
from runtimes.jax.parameters_and_optimizer_state import frozen_arrays
from runtimes.jax.sampler import Sampler, same_architecture
from runtimes.jax.step import errors
from runtimes.jax.torchax_bridge import as_function
from runtimes.process.job import Drawing, GenerateJob
from runtimes.sample.base_pipeline import BasePipeline
from runtimes.sample.load_network import load_network
from runtimes.torch_models.make_scheduler import make_scheduler
from runtimes.torch_models.network import Network


class ThePipeline(BasePipeline):
    """Implements contract.Pipeline."""

    def __init__(self, job: GenerateJob) -> None:
        super().__init__(job, make_scheduler, start(job.device, job.compiled, job.dtype).upload)
        self._mesh = Mesh(fsdp=1)

    def _release(self) -> None:
        self._arrays: Arrays = {}  # the network itself has no weights

    def _load_network(self, drawing: Drawing) -> Network:
        half = getattr(torch, self._job.dtype)
        job = self._job
        given = (half, torch.device("cpu"), job.text_dtype)
        network = load_network(drawing, job.model_folder, *given)
        self._arrays = frozen_arrays(network, self._mesh, half)
        if self._network is not None and same_architecture(network, self._network):
            return self._network  # its programs are reused
        self._errors = jax.jit(partial(errors, as_function(network, training=False)))
        return network

    def _open_sampler(self) -> Sampler:
        job = self._job
        return Sampler(job.model_folder, self._mesh, job.dtype, job.vae_folder)

    def _use_network(self) -> None:
        self._sampler.use(self._network, lambda: self._arrays, self._scheduler)

    def errors(self, batch: StepBatch) -> NDArray[np.float32]:
        dtype = jnp.dtype(self._job.dtype)
        rows = self._loss_rows
        return held_out_errors(self._errors, self._arrays, batch, rows, self._mesh, dtype)

    def compile_seconds(self) -> float:
        return compile_seconds()
