"""The MindSpore runtime: trains mindone's models on Ascend.

A step computes loss and gradients of each micro-batch, then the update. The forward and backward
pass run in PyNative mode, or as one compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops, profiler
from numpy.typing import NDArray

from configs.settings.train import Train
from configs.settings.train_parts import MindSpore
from runtimes.base_runtime import BaseRuntime
from runtimes.contract import State, StepBatch, StepOutput
from runtimes.mindspore.device import check, describe, memory_bytes, start, versions
from runtimes.mindspore.load_diffusers_weights import set_flash_attention
from runtimes.mindspore.network import (
    Inputs,
    Network,
    as_base,
    losses_of,
    micro_batches,
    prior_network,
)
from runtimes.mindspore.parallel import SingleProcess, open_parallel
from runtimes.mindspore.sampler import Sampler, make_scheduler
from runtimes.mindspore.update import Update, float32_copy
from runtimes.objective.noise_schedule import trained_scheduler_config
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import TrainJob
from runtimes.process.launcher import Ranks


@dataclass(frozen=True)
class Step:
    """The training step of a network.

    Args:
        network: trained network.
        gradients: gradients of its loss.
        update: update of the masters.
        parallel: sums the gradients of all processes.
        settings: micro-batch size and compute dtype.
        prior: the network that predicts targets of prior rows, see `prior_network`.
    """

    network: Network
    gradients: Gradients
    update: Update
    parallel: SingleProcess
    settings: Train
    prior: Network

    def __call__(self, batch: StepBatch, learning_rate: float) -> StepOutput:
        scale = Tensor(self.update.loss_scale.value, ms.float32)
        sums: list[Tensor] = []  # the loss, then each gradient
        for inputs in batch.on_device or self.inputs(batch):
            if inputs.has_prior:
                with as_base(self.prior):
                    inputs.set_prior_targets(self.prior)
            part = self.gradients(inputs, scale)
            sums = self.gradients.add(sums, part) if sums else part
        loss, *gradients = self.parallel.sum_over_ranks(sums)
        norm, skipped = self.update.apply(gradients, learning_rate)
        return StepOutput(loss, norm, overflowed=skipped)

    def inputs(self, batch: StepBatch) -> Iterator[Inputs]:
        """The batch's micro-batches."""
        dtype = getattr(ms, self.settings.compute_dtype)
        return micro_batches(batch, self.settings.micro_batch_size, self.network, dtype)


class Gradients:
    """Computes the unscaled loss, then the gradients of `scale` times the loss.

    Args:
        network: trained network.
        weights: parameters to differentiate, in the order of the gradients.
        settings: PyNative or graph mode, and the level of compilation.
    """

    def __init__(self, network: Network, weights: Sequence[Parameter], settings: MindSpore) -> None:
        backward = _Backward(network, weights)
        self._value_and_grad: Callable[..., Any] = backward
        if settings.mode == "graph":
            backend = {"O2": {"backend": "GE"}}.get(settings.jit_level)
            options = backend or {"jit_level": settings.jit_level}
            self._value_and_grad = ms.jit(backward.construct, **options)
        self._add = ms.jit(_add)

    def __call__(self, inputs: Inputs, scale: Tensor) -> list[Tensor]:
        rows = inputs.target, inputs.share, inputs.delta, inputs.mask
        loss, gradients = self._value_and_grad(*rows, scale, *inputs.seen)
        return [loss, *gradients]

    def add(self, sums: list[Tensor], part: list[Tensor]) -> list[Tensor]:
        """Add the loss and gradients of one micro-batch to the sums, in float32."""
        return list(self._add(*sums, *part))


class _Backward(nn.Cell):
    def __init__(self, network: Network, weights: Sequence[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        weights = ParameterTuple(weights)
        self.gradients = ops.value_and_grad(self.forward, None, weights, has_aux=True)

    def forward(
        self,
        target: Tensor,
        share: Tensor,
        delta: Tensor | None,
        mask: Tensor | None,
        scale: Tensor,
        *seen: Tensor,
    ) -> tuple[Tensor, Tensor]:
        loss = (losses_of(self.network(*seen), target, delta, mask) * share).sum()
        return loss * scale, loss

    def construct(
        self,
        target: Tensor,
        share: Tensor,
        delta: Tensor | None,
        mask: Tensor | None,
        scale: Tensor,
        *seen: Tensor,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        (_, loss), gradients = self.gradients(target, share, delta, mask, scale, *seen)
        return loss, gradients


def _add(*both: Tensor) -> tuple[Tensor, ...]:
    count = len(both) // 2
    return _each(_sum, both[:count], both[count:])


_each = ops.HyperMap()
_sum = ops.MultitypeFuncGraph("sum")


@_sum.register("Tensor", "Tensor")
def _sum_of(total: Tensor, part: Tensor) -> Tensor:
    return total.astype(ms.float32) + part.astype(ms.float32)


class TheRuntime(BaseRuntime):
    """Implements contract.Runtime. Weights are replicated, so rank 0 samples alone."""

    def load(self, job: TrainJob, base: Base) -> None:
        self._base = base
        self.versions = versions()
        settings = self._settings = Train(**job.train)
        ranks = self._ranks = Ranks.here()
        check(settings)
        self._target = start(settings.device, ranks)
        self.device = describe()
        parallel = self._collectives = open_parallel(ranks)
        self._dtype = getattr(ms, settings.compute_dtype)
        network = Network.load(job, base, settings)
        prior = prior_network(network, job, base, settings) if job.has_prior else network
        computed = network.trained()
        masters = computed
        if settings.method == "full" and settings.compute_dtype != "float32":
            masters = {name: float32_copy(f"master.{name}", p) for name, p in computed.items()}
            network.cast(self._dtype)
        for part in (*network.parts.values(), *prior.parts.values()):
            set_flash_attention(part, flash=settings.mindspore.flash_attention)
        reached = [name for name in computed if network.receives_gradient(name)]
        self._network = network.set_train(True)
        gradients = Gradients(network, [computed[n] for n in reached], settings.mindspore)
        self._update = Update(masters, computed, reached, settings)
        self._step = Step(network, gradients, self._update, parallel, settings, prior)

    def put(self, batch: StepBatch) -> StepBatch:
        parts = list(self._step.inputs(batch))
        if self._target == "Ascend" and self._settings.mindspore.data_sink:
            parts = [part.to_device() for part in parts]
        return replace(batch, on_device=parts)

    def _constants(self) -> State:
        return {}  # UNets and CLIP text encoders have no persistent buffers

    def errors(self, batch: StepBatch) -> NDArray[np.float32]:
        return Inputs(batch, self._network, self._dtype).errors(self._network).asnumpy()

    def memory_bytes(self) -> int:
        return memory_bytes()

    def _trace(self, folder: str) -> AbstractContextManager[None]:
        kinds = [profiler.ProfilerActivity.CPU]
        if self._target == "Ascend":
            kinds.append(profiler.ProfilerActivity.NPU)
        handler = profiler.tensorboard_trace_handler(folder)
        return profiler.profile(activities=kinds, on_trace_ready=handler)

    def _open_sampler(self) -> Any:
        flash = self._settings.mindspore.flash_attention
        sampler = Sampler(self._base, self._network.parts, self._dtype, flash=flash)
        config = trained_scheduler_config(self._base.scheduler, self._settings)
        sampler.use(None, None if config is None else make_scheduler(config))
        return sampler
