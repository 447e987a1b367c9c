"""The memory and FLOPs of a training step, as tpu_step_memory.py computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runtimes.process.job import HasNetwork


@dataclass(frozen=True)
class TpuStepRequest(HasNetwork):
    """A training step and the TPU slice to compile it for."""

    model: str  # local folder of the base pipeline; its configs are enough
    train: dict[str, Any]  # configs.settings.train.Train, dumped
    resolution: int  # of the pictures, pixels
    topology: str  # such as v5p-8
    vae: str | None = None
    denoiser_config: dict[str, Any] | None = None
    text_dtype: str | None = None  # as TrainJob.text_dtype


@dataclass(frozen=True)
class StepCost:
    """Cost of a step. Bytes and FLOPs are per chip and step unless a field says otherwise.

    FLOPs and seconds of a step with n micro-batches are n times those of one micro-batch with the
    update. The error is small, since the update is a small part.
    """

    compiler: str  # such as libtpu 0.0.42
    arguments: int  # bytes of weights, optimizer, average and batch
    temporaries: int  # bytes of activations, gradients, gathered weights (refused: all else)
    total: int  # peak bytes; 0 if unknown
    flops: float  # executed FLOPs, recomputation included
    kernel_flops: float  # those of attention kernels, without time in `optimal_seconds`
    bytes_accessed: float
    optimal_seconds: float | None  # per step, the compiler's estimate without kernel_flops
    flops_per_image: float | None  # forward and backward, without recomputation
    parameters: int  # number of trained parameters
    seconds: float  # duration of this estimate
    fits: bool  # whether the compiler accepted the program's memory
