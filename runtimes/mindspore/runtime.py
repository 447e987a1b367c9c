"""The MindSpore runtime: trains mindone's models on Ascend."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import profiler
from numpy.typing import NDArray

from configs.settings.train import Train
from runtimes.base_runtime import BaseRuntime
from runtimes.contract import State, StepBatch, StepOutput
from runtimes.mindspore.clip_update_and_ema import Update, float32_copy
from runtimes.mindspore.device import check, describe, memory_bytes, start, versions
from runtimes.mindspore.load_diffusers_weights import set_flash_attention
from runtimes.mindspore.micro_batches import Inputs
from runtimes.mindspore.network import Network
from runtimes.mindspore.parallel import open_parallel
from runtimes.mindspore.sampler import Sampler, make_scheduler
from runtimes.mindspore.step import Gradients, Step
from runtimes.objective.scheduler_config import trained_scheduler_config
from runtimes.process.job import TrainJob
from runtimes.process.ranks import Ranks


class TheRuntime(BaseRuntime):
    """Implements contract.Runtime. Weights are replicated, so rank 0 samples alone."""

    def load(self, job: TrainJob) -> None:
        self._job = job
        self.versions = versions()
        given = self._settings = Train(**job.train)
        ranks = self._ranks = Ranks.here()
        check(given)
        self._target = start(given.device, ranks)
        self.device = describe()
        parallel = self._collectives = open_parallel(ranks)
        self._dtype = getattr(ms, given.compute_dtype)
        network = Network.load(job, given)
        computed = network.trained()
        masters = computed
        if given.method == "full" and given.compute_dtype != "float32":
            masters = {name: float32_copy(f"master.{name}", p) for name, p in computed.items()}
            network.cast(self._dtype)
        for part in network.parts.values():
            set_flash_attention(part, flash=given.mindspore.flash_attention)
        reached = [name for name in computed if network.receives_gradient(name)]
        self._network = network.set_train(True)
        gradients = Gradients(network, [computed[n] for n in reached], given.mindspore)
        self._update = Update(masters, computed, reached, given)
        self._step = Step(network, gradients, self._update, parallel, given)

    def put(self, batch: StepBatch) -> StepBatch:
        parts = list(self._step.inputs(batch))
        if self._target == "Ascend" and self._settings.mindspore.data_sink:
            parts = [part.to_device() for part in parts]
        return replace(batch, on_device=parts)

    def step(self, batch: StepBatch, learning_rate: float) -> StepOutput:
        return self._step(batch, learning_rate)

    def _constants(self) -> State:
        return {}  # UNets and CLIP text encoders have no persistent buffers

    def errors(self, batch: StepBatch) -> NDArray[np.float32]:
        inputs = Inputs(batch, self._network, self._dtype)
        return inputs.errors(self._network).asnumpy()

    def memory_bytes(self) -> int:
        return memory_bytes()

    def _trace(self, folder: str) -> AbstractContextManager[None]:
        kinds = [profiler.ProfilerActivity.CPU]
        if self._target == "Ascend":
            kinds.append(profiler.ProfilerActivity.NPU)
        handler = profiler.tensorboard_trace_handler(folder)
        return profiler.profile(activities=kinds, on_trace_ready=handler)

    def _open_sampler(self) -> Any:
        job, flash = self._job, self._settings.mindspore.flash_attention
        parts, folder = self._network.parts, job.model_folder
        sampler = Sampler(folder, parts, self._dtype, job.vae_folder, flash=flash)
        config = trained_scheduler_config(folder / "scheduler", self._settings)
        sampler.use({}, None if config is None else make_scheduler(config))
        return sampler
