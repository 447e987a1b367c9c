"""A batch on its way to the device, a part of it for each forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from numpy.typing import NDArray

from runtimes.contract import UNCAST, StepBatch

Send = Callable[[NDArray[Any]], torch.Tensor]


def sender(device: torch.device) -> Send:
    """What sends arrays to a device; the host goes on meanwhile."""

    def send(array: NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if device.type != "cpu":
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    return send


def micro_batches(batch: StepBatch, size: int | None, send: Send) -> Iterator[Inputs]:
    """The parts of a batch that one forward pass takes at once; None is all of it."""
    for first, end in batch.micro_batches(size):
        yield Inputs(batch, send, first, end)


class Inputs:
    """Samples `first` to `end` of a batch, on the device.

    Args:
        send: puts an array there.
        dtype: of the latents and the conditioning.
    """

    def __init__(
        self,
        batch: StepBatch,
        send: Send,
        first: int = 0,
        end: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        part = slice(first, end)
        self.first, self.last = first, end in (None, len(batch.timesteps))
        self.noisy_latents = send(batch.noisy_latents[part]).to(dtype)
        self.timesteps = send(batch.timesteps[part])
        self.target, self.weight = send(batch.target[part]), send(batch.weight[part])
        self.conditioning = {
            name: send(array[part]) if name in UNCAST else send(array[part]).to(dtype)
            for name, array in batch.conditioning.items()
        }

    def errors(self, network: Any) -> torch.Tensor:
        """Mean squared error of each sample [B], in float32."""
        prediction = network(self.noisy_latents, self.timesteps, self.conditioning)
        return (prediction.float() - self.target).square().mean(dim=(1, 2, 3))
