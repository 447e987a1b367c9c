"""Count the FLOPs of a training step."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from numpy.typing import NDArray
from torch.utils.flop_counter import FlopCounterMode

from runtimes.contract import StepBatch
from runtimes.torch_models.activation_memory import without_recomputation

log = logging.getLogger("kiln")


class FlopCounter:
    """Counts the FLOPs of a forward and a backward pass, without recomputation.

    It runs a copy of the network on `meta` tensors, so nothing is computed. The copy has no
    gradient checkpointing.

    Args:
        network: the trained network.
        devices: number of devices that share a batch.
    """

    def __init__(self, network: torch.nn.Module, devices: int = 1) -> None:
        self._devices = devices
        self.network = without_weights(network).float().train()
        for part in self.network.children():
            without_recomputation(part)
        self._counted: dict[object, int | None] = {}

    def of(self, batch: StepBatch) -> float | None:
        """FLOPs of a device's share of a batch; those of one sample are counted once per shape.

        None if an operation of the network does not run on `meta` tensors.
        """
        arrays = {"": batch.noisy_latents, **batch.conditioning}
        shapes = tuple((name, array.shape[1:]) for name, array in arrays.items())
        if shapes not in self._counted:
            try:
                self._counted[shapes] = self._count(batch)
            except RuntimeError as error:
                log.warning("FLOPs cannot be counted, so there is no MFU: %s", error)
                self._counted[shapes] = None
        per_sample = self._counted[shapes]
        return None if per_sample is None else per_sample * len(batch.timesteps) / self._devices

    def _count(self, batch: StepBatch) -> int:
        with FlopCounterMode(display=False) as counter:
            self._backward(batch)
        self.network.zero_grad(set_to_none=True)
        return int(counter.get_total_flops())

    def reached(self, batch: StepBatch) -> set[str]:
        """Names of the parameters on which the loss of a batch depends.

        Raises:
            RuntimeError: an operation of the network does not run on `meta` tensors.
        """
        self._backward(batch)
        reached = {name for name, p in self.network.named_parameters() if p.grad is not None}
        self.network.zero_grad(set_to_none=True)
        return reached

    def _backward(self, batch: StepBatch) -> None:
        """A forward and backward pass of one sample."""

        def empty(array: NDArray[Any]) -> torch.Tensor:
            dtype = torch.from_numpy(array[:0]).dtype
            return torch.empty((1, *array.shape[1:]), dtype=dtype, device="meta")

        conditioning = {name: empty(array) for name, array in batch.conditioning.items()}
        predicted = self.network(empty(batch.noisy_latents), empty(batch.timesteps), conditioning)
        predicted.square().mean().backward()


def without_weights(network: torch.nn.Module) -> torch.nn.Module:
    """A copy of a network on the `meta` device; no weights are copied."""
    kept: dict[int, Any] = {}
    for parameter in network.parameters():
        empty = torch.empty_like(parameter, device="meta")
        kept[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in network.buffers():
        kept[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(network, kept)
