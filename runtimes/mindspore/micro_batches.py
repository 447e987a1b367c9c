"""Split a batch into micro-batches of MindSpore tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from numpy.typing import NDArray

from runtimes.contract import UNCAST, StepBatch
from runtimes.mindspore.network import Network


def squared_errors(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean squared error per sample [B] f32 of [B, C, h, w] arrays."""
    return ops.square(prediction.astype(ms.float32) - target).mean((1, 2, 3))


class Inputs:
    """One micro-batch: samples `first` to `end` (exclusive) of a batch.

    Args:
        batch: this rank's batch on the host.
        network: orders the conditioning.
        dtype: of the latents and of all conditioning that is not in contract.UNCAST.
        first: index of the first sample.
        end: index after the last sample; None is the end of the batch.

    Attributes:
        seen: arguments of the network: noisy latents [B, C, h, w], timesteps [B] and the
            conditioning [B, ...] in the order of Network.conditioning.
        target: [B, C, h, w] f32, the objective's regression target.
        share: [B] f32, each sample's loss weight divided by the global batch size.
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
        # Cast on the host: a cast on the device would wait behind the previous step's operators.
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
        """Mean squared error per sample [B] f32, without loss weights."""
        return squared_errors(network(*self.seen), self.target)

    def to_device(self) -> Inputs:
        """Start an asynchronous copy to the NPU; returns self."""
        self.seen = tuple(array.move_to("Ascend", blocking=False) for array in self.seen)
        self.target = self.target.move_to("Ascend", blocking=False)
        self.share = self.share.move_to("Ascend", blocking=False)
        return self


def micro_batches(
    batch: StepBatch, size: int | None, network: Network, dtype: ms.Type
) -> Iterator[Inputs]:
    """Yield micro-batches of at most `size` samples; None is the whole batch."""
    for first, end in batch.micro_batches(size):
        yield Inputs(batch, network, dtype, first, end)


def tensor(array: NDArray[Any]) -> Tensor:
    """A tensor with a contiguous copy of an array."""
    return Tensor(np.ascontiguousarray(array))
