"""Count the FLOPs of a training step."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from runtimes.contract import StepBatch
from runtimes.torch_models.activation_memory import without_recomputation
from runtimes.torch_models.gpu_specs import known_peak

log = logging.getLogger("kiln")


class FlopCounter:
    """Counts the FLOPs of a forward and a backward pass, without recomputation.

    It runs a copy of the network on `meta` tensors, so nothing is computed. The copy has no
    gradient checkpointing.
    """

    def __init__(self, network: torch.nn.Module) -> None:
        self.network = without_weights(network).float().train()
        for part in self.network.children():
            without_recomputation(part)
        self._counted: dict[object, int | None] = {}

    def of(self, batch: StepBatch) -> float | None:
        """FLOPs of a batch: those of one sample, counted once for each shape, times the batch size.

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
        return None if per_sample is None else float(per_sample * len(batch.timesteps))

    def _count(self, batch: StepBatch) -> int:
        def empty(array: Any) -> torch.Tensor:
            return torch.empty((1, *array.shape[1:]), dtype=_dtype(array), device="meta")

        conditioning = {name: empty(array) for name, array in batch.conditioning.items()}
        with FlopCounterMode(display=False) as counter:
            predicted = self.network(
                empty(batch.noisy_latents), empty(batch.timesteps), conditioning
            )
            predicted.square().mean().backward()
        self.network.zero_grad(set_to_none=True)
        return int(counter.get_total_flops())


def without_weights(network: torch.nn.Module) -> torch.nn.Module:
    """A copy of a network on the `meta` device; no weights are copied."""
    kept: dict[int, Any] = {}
    for parameter in network.parameters():
        empty = torch.empty_like(parameter, device="meta")
        kept[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in network.buffers():
        kept[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(network, kept)


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Peak FLOP/s of a CUDA device (see GpuSpec.peak); None for other or unknown devices."""
    if device.type != "cuda":
        return None
    return known_peak(torch.cuda.get_device_name(device), dtype)


def _dtype(array: Any) -> torch.dtype:
    return torch.from_numpy(array[:0]).dtype
