"""The MindSpore runtime: trains mindone's models on Ascend or CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from configs.training import Train
from runtimes.contract import Pipeline, State, StepBatch, StepOutput
from runtimes.mindspore.device import (
    check,
    choose,
    describe,
    memory_bytes,
    precision,
    start,
    versions,
)
from runtimes.mindspore.parallel import open_parallel
from runtimes.objective.scheduler_config import trained_scheduler
from runtimes.process.events import Events
from runtimes.process.job import GenerateJob, TrainJob
from runtimes.process.ranks import Ranks

__all__ = ["TheRuntime"]


class TheRuntime:
    """Implements contract.Runtime."""

    samples_collectively = False  # weights are replicated, so rank 0 samples alone

    def __init__(self, events: Events) -> None:
        self.versions = versions()
        self._events = events
        self._sampler: Any = None  # generate.Sampler, constructed by the first call of `sample`

    def load(self, job: TrainJob) -> None:
        self._job = job
        self._settings = Train(**job.train)
        ranks = Ranks.here()
        self._rank = ranks.rank
        check(self._settings)
        self._target = start(self._settings.device, ranks)
        self.device = describe()
        self._parallel = open_parallel(ranks)
        # mindone binds operators at import, and opening a CPU replaces some (device.py).
        from runtimes.mindspore.gradients import Gradients
        from runtimes.mindspore.models import set_flash_attention
        from runtimes.mindspore.network import Network
        from runtimes.mindspore.update import Update, float32_copy

        given = self._settings
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
        self._gradients = Gradients(network, [computed[n] for n in reached], given.mindspore)
        self._update = Update(masters, computed, reached, given)

    def put(self, batch: StepBatch) -> StepBatch:
        parts = list(self._inputs(batch))
        if self._target == "Ascend" and self._settings.mindspore.data_sink:
            parts = [part.to_device() for part in parts]
        return replace(batch, on_device=parts)

    def step(self, batch: StepBatch, learning_rate: float) -> StepOutput:
        scale = Tensor(self._update.loss_scale.value, ms.float32)
        sums: list[Tensor] = []  # the loss, then each gradient
        for inputs in batch.on_device or self._inputs(batch):
            part = self._gradients(inputs, scale)
            sums = self._gradients.add(sums, part) if sums else part
        loss, *gradients = self._parallel.sum_over_ranks(sums)
        norm, skipped = self._update.apply(gradients, learning_rate)
        return StepOutput(loss, norm, overflowed=skipped)

    def _inputs(self, batch: StepBatch) -> Iterator[Any]:
        from runtimes.mindspore.inputs import micro_batches

        return micro_batches(batch, self._settings.micro_batch_size, self._network, self._dtype)

    def flops(self, batch: StepBatch) -> float | None:
        return None

    def peak_flops(self) -> float | None:
        return None

    def any_rank(self, flag: bool) -> bool:
        return self._parallel.any(flag)

    def broadcast(self, number: int) -> int:
        return self._parallel.broadcast(number)

    def profile(self, folder: str) -> AbstractContextManager[None]:
        if self._rank:
            return nullcontext()
        from runtimes.mindspore.profile import tracing

        return tracing(folder, self._target)

    def state(self) -> State:
        return self._update.state() if self._rank == 0 else {}

    def restore(self, state: State, step: int) -> None:
        self._update.restore(state, step)

    def sample(self, prompts: Sequence[str], sampler: dict[str, Any]) -> NDArray[np.uint8]:
        from runtimes.mindspore.generate import Sampler, make_scheduler

        if self._sampler is None:
            vae = None if self._job.vae is None else Path(self._job.vae)
            model = Path(self._job.model)
            flash = self._settings.mindspore.flash_attention
            self._sampler = Sampler(model, self._network.parts, self._dtype, vae, flash=flash)
            changed = trained_scheduler(model / "scheduler", self._settings)
            if changed is not None:
                self._sampler.use({"scheduler": make_scheduler(changed)})
        with self._evaluating():
            return self._sampler.draw(prompts, sampler, first=0)

    def errors(self, batch: StepBatch) -> NDArray[np.float32]:
        from runtimes.mindspore.inputs import Inputs

        inputs = Inputs(batch, self._network, self._dtype)
        with self._evaluating():
            return inputs.errors(self._network).asnumpy()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Within the context, the network has its EMA weights, if any, and no dropout."""
        self._network.set_train(False)
        try:
            with self._update.averaged():
                yield
        finally:
            self._network.set_train(True)

    def shutdown(self) -> None:
        pass  # no process has to wait for the others

    def memory_bytes(self) -> int:
        return memory_bytes()

    def pipeline(self, job: GenerateJob) -> Pipeline:
        precision(job.dtype, choose(job.device)[0], "evaluate.dtype")
        start(job.device)  # before mindone is imported
        from runtimes.mindspore.generate import ThePipeline

        return ThePipeline(job)
