"""Sample images and compute held-out losses on XLA devices, for a sequence of models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from runtimes.contract import StepBatch
from runtimes.data.padding import pad_batch
from runtimes.models.micro_batches import Inputs
from runtimes.models.schedulers import make_scheduler
from runtimes.process.job import Drawing, GenerateJob
from runtimes.process.ranks import Ranks
from runtimes.sample.generate_job import LOSS_BATCH
from runtimes.sample.network import load_network
from runtimes.sample.start import load_trained_scheduler
from runtimes.xla.device import compile_seconds, start
from runtimes.xla.graph import replace_nearest_upsampling
from runtimes.xla.mesh import Mesh
from runtimes.xla.sampler import Sampler


class ThePipeline:
    """Implements contract.Pipeline."""

    def __init__(self, job: GenerateJob) -> None:
        self._compile_cache = start(job.device, job.compiled)
        self._job = job
        self._dtype = getattr(torch, job.dtype)
        self._mesh = Mesh(fsdp=1, hosts=Ranks.here().world)
        self._sampler: Sampler | None = None
        self._network: Any = None

    def load(self, drawing: Drawing) -> None:
        self._network = None  # frees the previous model's memory before the next one is loaded
        if self._sampler is not None:
            self._sampler.release_network()
        network = load_network(drawing, Path(self._job.model), self._dtype, torch.device("cpu"))
        replace_nearest_upsampling(network)
        self._mesh.shard_module(network)
        self._network, self._scheduler = network, load_trained_scheduler(drawing, make_scheduler)
        self.encodes_text = bool(network.text_encoders)

    def draw(self, prompts: Sequence[str], first: int) -> NDArray[np.uint8]:
        job = self._job
        if self._sampler is None:
            vae = None if job.vae is None else Path(job.vae)
            self._sampler = Sampler(Path(job.model), self._mesh, job.dtype, vae)
        self._sampler.use(self._network, self._scheduler)
        pictures = self._sampler.draw(prompts, job.sampler, first=first)
        self._compile_cache.upload()
        return pictures

    @torch.no_grad()
    def errors(self, batch: StepBatch) -> NDArray[np.float32]:
        count, rows = len(batch.timesteps), min(LOSS_BATCH, self._job.sampler["batch_size"])
        padded = pad_batch(batch, rows, self._mesh.local)
        inputs = Inputs(padded, self._mesh.shard_rows, dtype=self._dtype)
        return self._mesh.fetch_rows(inputs.errors(self._network)).numpy()[:count]

    def compile_seconds(self) -> float:
        return compile_seconds()
