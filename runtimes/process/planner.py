"""A planner's process: it reads a request and prints the plan as JSON.

tasks/plan/plan.py runs a planner's module on a request file. torch/gpu_plan.py computes a
StepMemory, of training or sampling; jax/tpu_step_memory.py computes a StepCost, of training.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from configs.errors import Refused
from runtimes.process.job import HasNetwork


def answer_planner(path: str, request: type[Any], compute: Callable[[Any], Any]) -> None:
    """Print the result of a request, or its error, as one JSON object.

    Args:
        path: JSON file with the request's fields.
        request: the request's dataclass.
        compute: returns a dataclass, or raises Refused.
    """
    fields = json.loads(Path(path).read_text(encoding="utf-8"))
    try:
        found = asdict(compute(request(**fields)))
    except Refused as error:
        found = {"wrong_input": str(error)}
    print(json.dumps(found))


#: Kinds of memory that change during a step. `compute_weights` are copies of weights in the compute
#: dtype, `activations` are made by the forward pass. `temporaries` are all else: recomputed
#: activations, gradients of activations, and what the update or the sampler allocates.
KINDS = ("gradients", "compute_weights", "activations", "temporaries")


@dataclass(frozen=True)
class GpuStepRequest(HasNetwork):
    """A training step, or a denoising step of sampling, to compute the memory of."""

    model: str  # local folder of the base pipeline; its configs are enough
    train: dict[str, Any]  # configs.settings.train.Train, dumped
    resolution: int  # side of the pictures to train on, pixels
    vae: str | None = None
    denoiser_config: dict[str, Any] | None = None
    text_dtype: str | None = None  # as TrainJob.text_dtype; held-out losses need the encoders too
    sampling_dtype: str | None = None  # None: a training step; else sampling in this dtype
    drawn_size: tuple[int, int] | None = None  # (height, width) of sampling; None: `resolution`
    device: str = "cuda"  # cuda or cpu, whose operators save different tensors


@dataclass(frozen=True)
class Moment:
    """Live memory at one moment of a step: kind -> (fixed bytes, bytes per sample)."""

    kinds: dict[str, tuple[int, int]]

    def parts(self, samples: int) -> dict[str, int]:
        """Bytes by kind for a batch size."""
        return {kind: fixed + samples * each for kind, (fixed, each) in self.kinds.items()}


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Memory of a step in bytes, and its FLOPs.

    In sampling, `weights` are those of the whole pipeline, and what training alone needs is 0.
    `offloaded` are those of a pipeline whose layers are offloaded: the VAE, and two layers of the
    largest size, one of which runs while the other is copied. Training offloads nothing.
    """

    parameters: int = 0  # number of trained parameters
    weights: int  # of the network, trained or not
    offloaded: int = 0
    encoders: int  # of text encoders and VAE, which training loads to draw samples
    optimizer: int = 0  # state of the requested optimizer; of AdamW if that is adamw_8bit
    optimizer_8bit: int = 0  # state of adamw_8bit
    ema: int = 0  # moving average, with its scratch
    largest: int = 0  # largest trained array, in float32
    moments: list[Moment]  # with the most live memory, if a step has one micro-batch
    accumulating: list[Moment]  # the same, if gradients of an earlier micro-batch exist
    flops_per_image: float  # forward and backward, without recomputation; of a denoising step
    recomputed_flops_per_image: float = 0.0
    seconds: float = 0.0  # duration of this computation

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> StepMemory:
        """Undo `dataclasses.asdict`."""
        lists = ("moments", "accumulating")
        return cls(**{**fields, **{name: [Moment(**m) for m in fields[name]] for name in lists}})

    def peak(self, samples: int, *, accumulating: bool = False) -> dict[str, int]:
        """Bytes by kind at the moment with the most live memory.

        Args:
            samples: per micro-batch; of sampling, pictures per batch.
            accumulating: whether a step has several micro-batches.
        """
        moments = self.accumulating if accumulating else self.moments
        return max((m.parts(samples) for m in moments), key=lambda parts: sum(parts.values()))


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
