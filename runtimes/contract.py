"""The contract between the shared loop and a runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from runtimes.process.job import Drawing, GenerateJob, TrainJob

#: Named arrays by group: `weights` (fp32 masters of what is trained), `exp_avg`, `exp_avg_sq`,
#: `ema`, `constants` (buffers of what is trained, if it has any) and `loss_scale` (of float16, see
#: mindspore/loss_scale.py). Except in `loss_scale`, a name is the pipeline's component and the
#: name of diffusers in it: `unet.conv_in.weight` or, of an adapter,
#: `unet.mid_block.attentions.0.proj_in.lora_A.weight`.
State = dict[str, dict[str, NDArray[np.float32]]]


class WrongInput(ValueError):
    """The job cannot be done as asked (weights, shapes, device); the message says what to do."""


#: Conditioning that stays as it is: half precision loses integers above 2048, and parts of a score.
UNCAST = ("add_time_ids", "aesthetic_score", "input_ids")


@dataclass(frozen=True)
class StepBatch:
    """One rank's share of one optimizer step, drawn on the host: the same for every runtime.

    The loss of a step is `sum_i weight[i] * mean((prediction_i - target_i)**2) / denominator`,
    summed over all ranks.
    """

    step: int
    noisy_latents: NDArray[np.float32]  # [B, C, h, w]
    timesteps: NDArray[np.int32] | NDArray[np.float32]  # [B]; f32 1000 sigma for a flow
    target: NDArray[np.float32]  # [B, C, h, w]
    weight: NDArray[np.float32]  # [B]
    conditioning: dict[str, NDArray[Any]]  # keyword -> [B, ...], as the family names them
    denominator: int  # global batch size
    on_device: Any = None  # what the runtime's `put` has sent ahead

    def micro_batches(self, size: int | None) -> Iterator[tuple[int, int]]:
        """First and end of the samples that one forward pass takes at once; None is all."""
        count = len(self.timesteps)
        for first in range(0, count, size or count):
            yield first, min(first + (size or count), count)


class Number(Protocol):
    """A value that may still be on its way from the device; float() waits for it."""

    def __float__(self) -> float: ...


@dataclass(frozen=True)
class StepOutput:
    """What a step reports; neither value is fetched from the device until it is asked for."""

    loss: Number
    grad_norm: Number  # L2 norm before clipping
    overflowed: bool = False  # at the loss scale: no number for a norm, and nothing was updated


def lazy_output(fetch: Callable[[], Sequence[float]]) -> StepOutput:
    """A step's loss and gradient norm; `fetch` is called when the first of them is asked for."""
    figures = _Fetch(fetch)
    return StepOutput(_LazyNumber(figures, 0), _LazyNumber(figures, 1))


@dataclass
class _Fetch:
    fetch: Callable[[], Sequence[float]]

    @cached_property
    def here(self) -> Sequence[float]:
        return self.fetch()


@dataclass(frozen=True)
class _LazyNumber:
    of: _Fetch
    place: int

    def __float__(self) -> float:
        return float(self.of.here[self.place])


@dataclass(frozen=True)
class Probe:
    """What a runtime finds on this machine."""

    available: bool
    devices: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    reason: str = ""  # why it is not available, and what to do


class Runtime(Protocol):
    """Forward, backward, update on one kind of chip. Everything else is shared.

    It may have a method `figures() -> dict[str, float]`: more than others tell of themselves, for
    progress and the boards.

    A runtime's module has a class that is called with the process's Events (see registry.py), and
    functions `probe() -> Probe` and `check(settings: Train) -> None`, which raises WrongInput.
    """

    device: str  # in words, once loaded
    versions: dict[str, str]  # of the packages that numbers depend on
    samples_collectively: bool  # once loaded: whether `sample` takes all ranks

    def load(self, job: TrainJob) -> None:
        """Put what is trained, and fresh optimizer state, on the device. Raises WrongInput."""

    def put(self, batch: StepBatch) -> StepBatch:
        """The batch with its arrays on their way to the device, for a later `step`. The loader's
        thread calls it, while steps are taken."""

    def step(self, batch: StepBatch, learning_rate: float) -> StepOutput:
        """One update on a batch, by the optimizer that the job's settings name."""

    def errors(self, batch: StepBatch) -> NDArray[np.float32]:
        """Mean squared error of each sample [B] (unweighted), by the average if one is kept."""

    def flops(self, batch: StepBatch) -> float | None:
        """Floating-point operations of a step on this rank's batch, none counted twice for
        recomputing; None where they cannot be counted."""

    def peak_flops(self) -> float | None:
        """Most FLOP a second that one device can do at the compute dtype, if known."""

    def any_rank(self, flag: bool) -> bool:
        """Whether any rank says so. Every rank calls it at the same place."""

    def broadcast(self, number: int) -> int:
        """Rank 0's number, on every rank. Every rank calls it at the same place."""

    def profile(self, folder: str) -> AbstractContextManager[None]:
        """Trace the steps within, into files below a local folder; on rank 0 alone."""

    def state(self) -> State:
        """Copies of weights, both moments and EMA, as named arrays: whole ones on rank 0, nothing
        on the others. Every rank calls it at the same place."""

    def restore(self, state: State, step: int) -> None:
        """Continue from a state as it was after `step` steps. Every rank is given all of it."""

    def sample(self, prompts: Sequence[str], sampler: dict[str, Any]) -> NDArray[np.uint8]:
        """Pictures [N, H, W, 3] by the weights so far (by their average, if one is kept).

        `sampler` is as in GenerateJob; the training state is left as it was, to the bit.
        """

    def shutdown(self) -> None:
        """Part from the other ranks: the last thing that all of them do together."""

    def memory_bytes(self) -> int:
        """Peak bytes in use on the device (of the process, on a CPU)."""

    def pipeline(self, job: GenerateJob) -> Pipeline:
        """What draws the job's pictures. Raises WrongInput."""


class PipelineEncoder(Protocol):
    """A pipeline's VAE and text encoders on some device. Arrays are of the host."""

    info: dict[str, Any]  # as encoders.describe_encoders

    def images(self, pixels: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Mean and log-variance [B, C, h, w] of the latents of pictures [B, 3, H, W] in -1..1."""

    def texts(self, captions: Sequence[str]) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Prompt embeddings [K, T, D] and, where the family has them, pooled ones [K, P]."""

    def input_ids(self, captions: Sequence[str]) -> NDArray[np.int64]:
        """Token ids [K, n, T], by each of n CLIP tokenizers."""

    def token_counts(self, captions: Sequence[str]) -> list[int]:
        """Tokens of each caption before truncation."""


class Pipeline(Protocol):
    """Draws with one model after another on one kind of chip; sample/generate.py does the rest."""

    encodes_text: bool  # whether captions are to be encoded by the model that was taken

    def load(self, drawing: Drawing) -> None:
        """Put a model on the device, in place of the one before. Raises WrongInput."""

    def draw(self, prompts: Sequence[str], first: int) -> NDArray[np.uint8]:
        """Pictures [N, H, W, 3] by the job's sampler; the first one's noise is number `first`."""

    def errors(self, batch: StepBatch) -> NDArray[np.float32]:
        """Mean squared error of each sample [B] (unweighted)."""

    def compile_seconds(self) -> float:
        """Time spent compiling so far; 0 where nothing is compiled."""
