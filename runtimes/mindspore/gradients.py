"""Loss and gradients of a micro-batch, in PyNative mode or as one compiled graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from configs.hardware import MindSpore
from runtimes.mindspore.inputs import Inputs, squared_errors
from runtimes.mindspore.network import Network


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
