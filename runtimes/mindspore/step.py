"""One training step: loss and gradients of each micro-batch, then the update.

Forward and backward pass run in PyNative mode, or as one compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from configs.settings.train import Train
from configs.settings.train_parts import MindSpore
from runtimes.contract import StepBatch, StepOutput
from runtimes.mindspore.clip_update_and_ema import Update
from runtimes.mindspore.micro_batches import Inputs, micro_batches, squared_errors
from runtimes.mindspore.network import Network
from runtimes.mindspore.parallel import SingleProcess


@dataclass(frozen=True)
class Step:
    """The training step of a network.

    Args:
        network: trained network.
        gradients: of its loss.
        update: of the masters.
        parallel: sums the gradients of all processes.
        settings: micro-batch size and compute dtype.
    """

    network: Network
    gradients: Gradients
    update: Update
    parallel: SingleProcess
    settings: Train

    def __call__(self, batch: StepBatch, learning_rate: float) -> StepOutput:
        scale = Tensor(self.update.loss_scale.value, ms.float32)
        sums: list[Tensor] = []  # the loss, then each gradient
        for inputs in batch.on_device or self.inputs(batch):
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
        self._add = ms.jit(_Add().construct)

    def __call__(self, inputs: Inputs, scale: Tensor) -> list[Tensor]:
        loss, gradients = self._value_and_grad(inputs.target, inputs.share, scale, *inputs.seen)
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
        self, target: Tensor, share: Tensor, scale: Tensor, *seen: Tensor
    ) -> tuple[Tensor, Tensor]:
        errors = squared_errors(self.network(*seen), target)
        loss = (errors * share).sum()
        return loss * scale, loss

    def construct(
        self, target: Tensor, share: Tensor, scale: Tensor, *seen: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        (_, loss), gradients = self.gradients(target, share, scale, *seen)
        return loss, gradients


class _Add(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.each = ops.HyperMap()

    def construct(self, *both: Tensor) -> tuple[Tensor, ...]:
        count = len(both) // 2
        return self.each(_sum, both[:count], both[count:])


_sum = ops.MultitypeFuncGraph("sum")


@_sum.register("Tensor", "Tensor")
def _sum_of(total: Tensor, part: Tensor) -> Tensor:
    return total.astype(ms.float32) + part.astype(ms.float32)
