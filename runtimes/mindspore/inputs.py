"""A batch as MindSpore's tensors, a part of it for each forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from numpy.typing import NDArray

from runtimes.contract import UNCAST, StepBatch
from runtimes.mindspore.network import Network


class Inputs:
    """Samples `first` to `end` of a batch.

    Attributes:
        seen: what the network takes: noisy latents, timesteps and conditioning.
        target: [B, C, h, w] f32.
        share: of each sample in the step's loss [B] f32.
    """

    def __init__(
        self,
        batch: StepBatch,
        network: Network,
        dtype: ms.Type,
        first: int = 0,
        end: int | None = None,
    ) -> None:
        part = slice(first, end)
        self.first = first
        # Cast on the host: an operator would be the device's, amid those of the step before.
        kind = ms.dtype_to_nptype(dtype)
        latents = tensor(batch.noisy_latents[part].astype(kind))
        given = batch.conditioning
        conditioning = [
            tensor(given[name][part] if name in UNCAST else given[name][part].astype(kind))
            for name in network.conditioning(given)
        ]
        self.seen = (latents, tensor(batch.timesteps[part]), *conditioning)
        self.target = tensor(batch.target[part])
        self.share = tensor(batch.weight[part] / np.float32(batch.denominator))

    def errors(self, network: Network) -> Tensor:
        """Mean squared error of each sample [B], in float32."""
        return squared_errors(network(*self.seen), self.target)

    def to_device(self) -> Inputs:
        """The same, on its way to the NPU; the host goes on meanwhile."""
        self.seen = tuple(array.move_to("Ascend", blocking=False) for array in self.seen)
        self.target = self.target.move_to("Ascend", blocking=False)
        self.share = self.share.move_to("Ascend", blocking=False)
        return self


def micro_batches(
    batch: StepBatch, size: int | None, network: Network, dtype: ms.Type
) -> Iterator[Inputs]:
    """The parts of a batch that one forward pass takes at once; None is all of it."""
    for first, end in batch.micro_batches(size):
        yield Inputs(batch, network, dtype, first, end)


def squared_errors(prediction: Tensor, target: Tensor) -> Tensor:
    """Of each sample [B] the mean over the rest, in float32."""
    return ops.square(prediction.astype(ms.float32) - target).mean((1, 2, 3))


def tensor(array: NDArray[Any]) -> Tensor:
    """A tensor with a copy of an array."""
    return Tensor(np.ascontiguousarray(array))
