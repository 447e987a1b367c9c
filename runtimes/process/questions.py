"""Questions to a separate process, which answers in JSON, and the questions and answers of plans.

torch/gpu_step_memory.py computes a StepMemory, of training or sampling; jax/tpu_step_memory.py
computes a StepCost, of training. A runtime's probe and the smoke test are asked in the same way.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from typing import Any

from configs.errors import Failed, Refused
from runtimes.process.job import HasNetwork

QUOTED = 20  # lines of a log that an error quotes


class Unanswered(Failed):
    """The process ended without an answer; the message has the last lines of its log.

    Attributes:
        code: its exit status; None if it was killed at the time limit.
        log: its standard error.
        last: the last line of `log`, or else the exit status.
    """

    def __init__(self, module: str, code: int | None, log: str) -> None:
        lines = log.strip().splitlines()
        quoted = "\n".join(lines[-QUOTED:])
        super().__init__(f"{module} ended with {code}: {quoted}")
        self.code = code
        self.log = log
        self.last = lines[-1] if lines else f"exit status {code}"


def ask(
    *words: str,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    seconds: float | None = None,
) -> dict[str, Any]:
    """The JSON object in the last line of output of a process, `python -P WORDS`.

    Args:
        words: `-m` and a module, or a script; then its arguments.
        environment: variables that are added to those of this process.
        seconds: time limit; None: none.

    Raises:
        Refused: the process refuses its arguments, see `answer`.
        Unanswered: it failed.
        OSError: it cannot be started.
    """
    command = [python, "-P", *words]
    env = {**os.environ, **(environment or {})}
    module = words[1] if words[0] == "-m" else words[0]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds)
        answered = dict(json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        raise Unanswered(module, None, "") from None
    except (ValueError, IndexError, TypeError):
        raise Unanswered(module, done.returncode, done.stderr) from None
    if "wrong_input" in answered:
        raise Refused(answered["wrong_input"])
    return answered


def answer(compute: Callable[[], Any]) -> None:
    """Print the dataclass that `compute` returns, or its Refused, for `ask`; None: nothing."""
    try:
        computed = compute()
        answered = {} if computed is None else asdict(computed)
    except Refused as error:
        answered = {"wrong_input": str(error)}
    print(json.dumps(answered))


#: Kinds of memory that change during a step. `compute_weights` are copies of weights in the compute
#: dtype, `activations` are made by the forward pass. `temporaries` are all else: recomputed
#: activations, gradients of activations, and what the update or the sampler allocates.
KINDS = ("gradients", "compute_weights", "activations", "temporaries")


@dataclass(frozen=True)
class StepRequest(HasNetwork):
    """A training step whose cost is asked."""

    model: str  # local folder of the base pipeline; its configs are enough
    train: dict[str, Any]  # configs.settings.train.Train, dumped
    resolution: int  # side of the pictures to train on, pixels
    _: KW_ONLY
    vae: str | None = None
    denoiser_config: dict[str, Any] | None = None
    text_dtype: str | None = None  # as TrainJob.text_dtype; held-out losses need the encoders too
    has_prior: bool = False  # as TrainJob.has_prior
    #: (height, width) in pixels of the references of each picture.
    references: tuple[tuple[int, int], ...] = ()
    control_start: str | None = None  # as TrainJob.control_start
    max_tokens: int = 77
    emphasis: str = "text"


@dataclass(frozen=True)
class GpuStepRequest(StepRequest):
    """A training step, a denoising step of sampling, or encoding, to compute the memory of."""

    sampling_dtype: str | None = None  # None: a training step; else sampling in this dtype
    encoding_dtype: str | None = None  # else encoding of pictures and captions in this dtype
    text_precision: str | None = None  # of encoding, as EncodeJob.text_precision
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

    What training alone needs is 0 in sampling and encoding. Sampling encodes its prompts before it
    loads the denoiser, so its `weights` are those of denoiser and VAE. Encoding has those of text
    encoders and VAE; its `moments` are of pictures, `captions` of captions.

    `offloaded` are the weights on a device whose layers are offloaded: the VAE, and two layers of
    the largest size, one of which runs while the other is copied. `pinned` are then in the host's
    memory: the denoiser in sampling, the text encoders in encoding. Training offloads nothing.

    `streaming` has what `train.stream_blocks` moves, for each number of blocks from 0 to all: bytes
    of `weights` that leave the device, less two buffers there, and of the host's pinned memory.
    Nothing else of a step changes. `streamed` are the latter, once `weights` lacks the former.
    """

    parameters: int = 0  # number of trained parameters
    weights: int  # of the network, trained or not
    offloaded: int = 0
    pinned: int = 0
    streamed: int = 0  # of the host's memory, pinned
    streaming: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    optimizer: int = 0  # state of the requested optimizer, with 32 bits instead of 8
    optimizer_8bit: int = 0  # state of adamw_8bit
    ema: int = 0  # moving average, with its scratch
    largest: int = 0  # largest trained array, in float32
    moments: list[Moment]  # with the most live memory, if a step has one micro-batch
    accumulating: list[Moment]  # the same, if gradients of an earlier micro-batch exist
    captions: list[Moment] = field(default_factory=list)
    flops_per_image: float  # forward and backward, without recomputation; of a denoising step
    recomputed_flops_per_image: float = 0.0
    seconds: float = 0.0  # duration of this computation

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> StepMemory:
        """Undo `dataclasses.asdict`."""
        lists = ("moments", "accumulating", "captions")
        return cls(**{**fields, **{name: [Moment(**m) for m in fields[name]] for name in lists}})

    def with_streamed(self, blocks: int) -> StepMemory:
        """The same step with that many streamed blocks, or all if it has fewer."""
        saved, pinned = self.streaming[min(blocks, len(self.streaming) - 1)]
        return replace(self, weights=self.weights - saved, streamed=pinned)

    def sharded(self, group: int, gathered: int) -> StepMemory:
        """The same step on each of `group` devices that share its state by FSDP, at most.

        Weights are counted as if all were gathered at once; FSDP frees a block's after its pass.

        Args:
            gathered: bytes of all weights as they are gathered.
        """

        def share(moment: Moment) -> Moment:
            fixed, each = moment.kinds["gradients"]
            changed = {"gradients": (-(-fixed // group), each), "compute_weights": (gathered, 0)}
            return Moment({**moment.kinds, **changed})

        names = ("weights", "optimizer", "optimizer_8bit", "ema")
        sizes: dict[str, Any] = {name: -(-getattr(self, name) // group) for name in names}
        moments = [share(moment) for moment in self.moments]
        accumulating = [share(moment) for moment in self.accumulating]
        return replace(self, **sizes, moments=moments, accumulating=accumulating)

    def optimizer_state(self, name: str) -> int:
        """Bytes of the state of a `train.optimizer`, the requested one or one of 8 bits."""
        of_8bit = {"adamw_8bit": self.optimizer_8bit, "lion_8bit": self.optimizer_8bit // 2}
        return of_8bit.get(name, self.optimizer)

    def held(self, *, offloads: bool) -> int:
        """Bytes of weights on the device."""
        return self.offloaded if offloads else self.weights

    def captions_peak(self, captions: int) -> int:
        """Bytes beside the weights at the moment with the most live memory, for a batch."""
        return max(sum(moment.parts(captions).values()) for moment in self.captions)

    def peak(self, samples: int, *, accumulating: bool = False) -> dict[str, int]:
        """Bytes by kind at the moment with the most live memory.

        Args:
            samples: per micro-batch; of sampling, pictures per batch.
            accumulating: whether a step has several micro-batches.
        """
        moments = self.accumulating if accumulating else self.moments
        return max((m.parts(samples) for m in moments), key=lambda parts: sum(parts.values()))


@dataclass(frozen=True)
class TpuStepRequest(StepRequest):
    """A training step and the TPU slice to compile it for."""

    topology: str  # such as v5p-8


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
