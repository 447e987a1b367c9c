"""Count the FLOPs of a training step; peak FLOP/s of GPUs from their data sheets."""

from __future__ import annotations

import copy
import logging
import re
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from runtimes.contract import StepBatch

#: (pattern of CUDA's device name, bfloat16 TFLOP/s, float32 TFLOP/s); the first match applies.
#: bfloat16 is dense, on tensor cores with float32 accumulation; float32 is without tensor cores,
#: since TF32 is off. Sources: NVIDIA's data sheets, with sparse figures halved; for GeForce cards
#: the white papers "Ada GPU architecture" (table 4), "GA102" (table 3) and "RTX Blackwell"
#: (appendix A); for A10G the page of AWS's G5 instances.
PEAKS: tuple[tuple[str, float | None, float], ...] = (
    (r"GB200", 2500.0, 80.0),
    (r"B200", 2250.0, 75.0),
    (r"H200 NVL", 835.5, 60.0),
    (r"H200|GH200", 989.5, 67.0),
    (r"H100 NVL", 835.5, 60.0),
    (r"H100 PCIe", 756.5, 51.0),
    (r"H100", 989.5, 67.0),
    (r"A100|A800", 312.0, 19.5),
    (r"A40\b", 149.7, 37.4),
    (r"A30\b", 165.0, 10.3),
    (r"A10G", 70.0, 31.5),
    (r"A10\b", 125.0, 31.2),
    (r"L40S", 362.0, 91.6),
    (r"L40\b", 181.0, 90.5),
    (r"L4\b", 121.0, 30.3),
    (r"RTX 6000 Ada", 364.2, 91.1),
    (r"RTX A6000", 154.8, 38.7),
    (r"RTX 5090", 209.5, 104.8),
    (r"RTX 4090", 165.2, 82.6),
    (r"RTX 3090", 71.0, 35.6),
    (r"V100", None, 15.7),
    (r"T4\b", None, 8.1),
)
log = logging.getLogger("kiln")


class FlopCounter:
    """Counts the FLOPs of a forward and a backward pass, without recomputation.

    It runs a copy of the network on `meta` tensors, so nothing is computed. The copy has no
    gradient checkpointing.
    """

    def __init__(self, network: torch.nn.Module) -> None:
        self.network = without_weights(network).float().train()
        for part in self.network.children():
            if getattr(part, "is_gradient_checkpointing", False):
                names = ("disable_gradient_checkpointing", "gradient_checkpointing_disable")
                next(getattr(part, name) for name in names if hasattr(part, name))()
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
            except (RuntimeError, NotImplementedError) as error:
                log.warning("FLOPs cannot be counted, so there is no MFU: %s", error)
                self._counted[shapes] = None
        one = self._counted[shapes]
        return None if one is None else float(one * len(batch.timesteps))

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


def peak_flops(device: torch.device, compute_dtype: str) -> float | None:
    """Peak FLOP/s of a CUDA device at a compute dtype; None for other or unknown devices."""
    if device.type != "cuda":
        return None
    return known_peak(torch.cuda.get_device_name(device), compute_dtype)


def known_peak(name: str, compute_dtype: str) -> float | None:
    """Peak FLOP/s from `PEAKS` of the GPU with a CUDA device name; None if it is unknown."""
    for pattern, half, single in PEAKS:
        if re.search(pattern, name):
            tera = half if compute_dtype == "bfloat16" else single
            return None if tera is None else tera * 1e12
    return None


def _dtype(array: Any) -> torch.dtype:
    return torch.from_numpy(array[:0]).dtype
