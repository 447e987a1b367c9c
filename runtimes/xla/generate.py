"""Sample images and compute held-out losses on XLA devices, for a sequence of models."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from runtimes.contract import StepBatch
from runtimes.data.padding import pad_batch
from runtimes.process.job import Drawing, GenerateJob
from runtimes.process.ranks import Ranks
from runtimes.sample.base_pipeline import BasePipeline
from runtimes.sample.load_network import load_network
from runtimes.torch_models.make_scheduler import make_scheduler
from runtimes.torch_models.micro_batches import Inputs
from runtimes.torch_models.network import Network
from runtimes.xla.device import compile_seconds, start
from runtimes.xla.mesh import Mesh
from runtimes.xla.sampler import Sampler


class ThePipeline(BasePipeline):
    """Implements contract.Pipeline."""

    def __init__(self, job: GenerateJob) -> None:
        super().__init__(job, make_scheduler, start(job.device, job.compiled).upload)
        self._dtype = getattr(torch, job.dtype)
        self._mesh = Mesh(fsdp=1, hosts=Ranks.here().world)

    def _load_network(self, drawing: Drawing) -> Network:
        job = self._job
        given = (self._dtype, torch.device("cpu"), job.text_dtype)
        network = load_network(drawing, job.model_folder, *given)
        self._mesh.shard_module(network)
        return network

    def _open_sampler(self) -> Sampler:
        job = self._job
        return Sampler(job.model_folder, self._mesh, job.dtype, job.vae_folder)

    @torch.no_grad()
    def errors(self, batch: StepBatch) -> NDArray[np.float32]:
        padded = pad_batch(batch, self._loss_rows, self._mesh.local)
        inputs = Inputs(padded, self._mesh.shard_rows, dtype=self._dtype)
        errors = self._mesh.fetch_rows(inputs.errors(self._network)).numpy()
        return errors[: len(batch.timesteps)]

    def compile_seconds(self) -> float:
        return compile_seconds()
