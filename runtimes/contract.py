"""The interface between the shared code and a runtime: batches, state, protocols, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from configs.errors import Failed, Refused

if TYPE_CHECKING:
    from PIL.Image import Image

    from runtimes.pipeline_folder.folder import Base
    from runtimes.process.job import Drawing, TrainJob

#: Training state: group -> name -> array. Groups: `weights` (fp32 trained parameters), `exp_avg`
#: and `exp_avg_sq` (AdamW's moments; torch/make_optimizer.py has the groups of other optimizers),
#: `ema`, `constants` (buffers of the trained components) and `loss_scale` (float16 only, see
#: mindspore/loss_scale.py). Except in `loss_scale`, a name is the pipeline's component and
#: diffusers' name in it: `unet.conv_in.weight` or, for an adapter,
#: `unet.mid_block.attentions.0.proj_in.lora_A.weight`.
State = dict[str, dict[str, NDArray[np.float32]]]
#: group -> name -> shape of the full array.
StateShapes = dict[str, dict[str, tuple[int, ...]]]
#: group -> name -> rank that copies the array to its host; no rank copies an array without entry.
Owners = Mapping[str, Mapping[str, int]]


class StoredRows(Protocol):
    """An array of a saved state; indexing reads it. NumPy arrays qualify."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, index: Any, /) -> Any: ...


#: A State whose arrays are not in memory yet.
SavedState = Mapping[str, Mapping[str, StoredRows]]


class Writers(Protocol):
    """The ranks of a run, which write a checkpoint together."""

    rank: int  # of this process
    world: int

    def gather(self, data: bytes) -> list[bytes]:
        """The data of every writer, by rank. Collective, also in a background thread."""


@dataclass
class OneWriter:
    """A run with one process."""

    rank: int = 0
    world: int = 1

    def gather(self, data: bytes) -> list[bytes]:
        return [data]


class ImagesNotFinite(Refused):
    """Sampled images have pixels without a value."""


class WeightsLost(Failed):
    """Trained and averaged weights are mixed: only a restored State can continue the run."""


#: Conditioning that keeps its dtype. float16 is inexact for sizes and token ids above 2048, and for
#: a fractional aesthetic score.
UNCAST = ("add_time_ids", "aesthetic_score", "input_ids")


#: Arrays [B, ...] that a StepBatch may have, besides the ones it always has.
OPTIONAL = ("loss_mask", "huber_delta", "is_prior")


@dataclass(frozen=True)
class StepBatch:
    """One rank's share of the batch of one optimizer step, prepared on the host for any runtime.

    The loss of a step is `sum_i weight[i] * mean(mask_i * l(prediction_i - target_i)) /
    denominator`, summed over all ranks. The mask is 1 and l is the square, unless a setting changes
    them.
    """

    step: int
    noisy_latents: NDArray[np.float32]  # [B, C, h, w]
    timesteps: NDArray[np.int32] | NDArray[np.float32]  # [B]; f32 1000 sigma for a flow
    target: NDArray[np.float32]  # [B, C, h, w]
    weight: NDArray[np.float32]  # [B]
    conditioning: dict[str, NDArray[Any]]  # keyword -> [B, ...], see Family.condition
    denominator: int  # global batch size
    loss_mask: NDArray[np.float32] | None = None  # [B, h, w], factor of the error; None: 1
    huber_delta: NDArray[np.float32] | None = None  # [B], of train.loss; None: the squared error
    #: [B], whether the target is the frozen base's prediction instead; None: of no row.
    is_prior: NDArray[np.bool_] | None = None
    on_device: Any = None  # the runtime's own copy of the arrays, made by `put`

    @property
    def has_prior(self) -> bool:
        """Whether a row's target is the frozen base's prediction."""
        return self.is_prior is not None and bool(self.is_prior.any())

    def micro_batches(self, size: int | None) -> Iterator[tuple[int, int]]:
        """(start, end) of each micro-batch of at most `size` samples; None is the whole batch."""
        count = len(self.timesteps)
        for start in range(0, count, size or count):
            yield start, min(start + (size or count), count)


class Number(Protocol):
    """A scalar that the device may still compute; float() waits for it."""

    def __float__(self) -> float: ...


@dataclass(frozen=True)
class StepOutput:
    """Loss and gradient norm of a step; neither is fetched from the device before float()."""

    loss: Number
    grad_norm: Number  # L2 norm before clipping
    overflowed: bool = False  # gradients overflowed at the loss scale: the update was skipped


def lazy_output(fetch: Callable[[], Sequence[float]]) -> StepOutput:
    """A StepOutput that calls `fetch` once, at the first float().

    Args:
        fetch: returns (loss, gradient norm) from the device.
    """
    fetch_once = cache(fetch)
    return StepOutput(_LazyNumber(fetch_once, 0), _LazyNumber(fetch_once, 1))


@dataclass(frozen=True)
class _LazyNumber:
    fetch: Callable[[], Sequence[float]]
    index: int

    def __float__(self) -> float:
        return float(self.fetch()[self.index])


@dataclass(frozen=True)
class Probe:
    """The devices and packages that a runtime finds on this machine."""

    available: bool
    devices: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    reason: str = ""  # why the runtime is not available, and the remedy

    @property
    def names(self) -> set[str]:
        """What a setting may name: `cuda:0`, `cuda`, `cpu`; the rest of an entry describes it."""
        numbered = {device.split()[0] for device in self.devices}
        return numbered | {name.partition(":")[0] for name in numbered}


class Runtime(Protocol):
    """Forward pass, backward pass and update on one kind of device. All other code is shared.

    The runtime's package also has the functions `probe() -> Probe` and `check(settings: Train) ->
    None`, which raises Refused.
    """

    device: str  # description of the device, after `load`
    versions: dict[str, str]  # package -> version, of the packages that affect the numbers
    samples_collectively: bool  # after `load`: whether `sample` is a collective of all ranks
    writers: Writers  # after `load`: collectives of all ranks, for the thread that writes

    def load(self, job: TrainJob, base: Base) -> None:
        """Load the model and fresh optimizer state on the device. Raises Refused."""

    def put(self, batch: StepBatch) -> StepBatch:
        """Start the batch's transfer to the device, for a later `step`.

        The loader's thread calls it while the main thread runs steps.
        """

    def step(self, batch: StepBatch, learning_rate: float) -> StepOutput:
        """One optimizer update on a batch, with the optimizer of the job's settings."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Within the context, the network has its EMA weights, if any, and no dropout.

        Raises:
            WeightsLost: the trained weights could not be restored.
        """

    def errors(self, batch: StepBatch) -> NDArray[np.float32]:
        """Unweighted mean squared error per sample [B], within the context of `evaluating`."""

    def flops(self, batch: StepBatch) -> float | None:
        """FLOP of a step on this rank's batch, without recomputation; None if unknown."""

    def peak_flops(self) -> float | None:
        """Peak FLOP per second of one device at the compute dtype; None if unknown."""

    def any_rank(self, flag: bool) -> bool:
        """Logical or of `flag` over all ranks. Collective."""

    def broadcast(self, number: int) -> int:
        """Rank 0's `number`, on all ranks. Collective."""

    def figures(self) -> dict[str, float]:
        """Metrics of this kind of device, for progress events and trackers."""

    def profile(self, folder: str) -> AbstractContextManager[None]:
        """Trace the steps inside the `with` block to files in a local folder, on rank 0 alone."""

    def state_shapes(self) -> StateShapes:
        """Shapes of all arrays of the state, the same on every rank."""

    def state(self, owners: Owners | None = None) -> State:
        """Host copies of the full arrays that this rank owns. Collective.

        A sharded array is gathered on the devices before the next one, so that no process holds
        more than its own arrays and one other.

        Args:
            owners: the same on all ranks; None: rank 0 owns every array.
        """

    def restore(self, state: SavedState, step: int) -> None:
        """Load a state after `step` steps. Each rank reads the rows that its devices need.

        Raises:
            Refused: the state has other names or shapes than this model.
        """

    def scalars(self) -> dict[str, float]:
        """Numbers of the optimizer's state that belong to no weight, such as Prodigy's `d.0`."""

    def restore_scalars(self, scalars: Mapping[str, float]) -> None:
        """Restore what `scalars` returned, after `restore`."""

    def sample(
        self, prompts: Sequence[str], sampler: dict[str, Any], controls: Sequence[str] = ()
    ) -> NDArray[np.uint8]:
        """Images [N, H, W, 3] uint8 from the current weights (from the EMA, if any).

        Must not change one bit of the training state.

        Args:
            prompts: N prompts.
            sampler: as GenerateJob.sampler.
            controls: URLs of N control pictures for the ControlNet in training; (): there is none.
        """

    def shutdown(self) -> None:
        """Shut down distributed state. Every rank must call it last."""

    def memory_bytes(self) -> int:
        """Peak memory of the device in bytes; on a CPU, of the process."""


class PipelineEncoder(Protocol):
    """A pipeline's VAE and text encoders on a device. Arguments and results are on the host."""

    info: Mapping[str, Any]  # see pipeline_folder.folder.Base.encoders
    limits: Mapping[str, int]  # see pipeline_folder.folder.Base.caption_limits

    def images(self, pixels: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[Any]]:
        """VAE posterior of images [B, 3, H, W] in [-1, 1]: mean and log-variance [B, C, h, w]."""

    def texts(self, captions: Sequence[str]) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Prompt embeddings [K, T, D] and pooled ones [K, P] (None if the family has none)."""

    def texts_with_pictures(
        self, captions: Sequence[str], pictures: Sequence[Sequence[Image]]
    ) -> list[NDArray[np.float32]]:
        """Prompt embeddings, K of [T, D], of K captions and the references beside each.

        References are results of `Family.condition_picture`.
        """

    def input_ids(self, captions: Sequence[str]) -> NDArray[np.int64]:
        """Token ids [K, n, T] from the pipeline's n CLIP tokenizers."""

    def token_counts(self, captions: Sequence[str]) -> dict[str, list[int]]:
        """Text encoder -> number of tokens of each caption before it is cut.

        The encoder with the longest limit comes last.
        """


class Pipeline(Protocol):
    """Generates images with one model after another on one device, for sample/generate_job.py."""

    encodes_text: bool  # whether the loaded model must encode captions itself

    def load(self, drawing: Drawing) -> None:
        """Load a model on the device and release the previous one. Raises Refused."""

    def draw(
        self,
        prompts: Sequence[str],
        first: int,
        references: Sequence[Sequence[str]] = (),
        controls: Sequence[str] = (),
    ) -> NDArray[np.uint8]:
        """Images [N, H, W, 3] uint8; image i starts from noise number `first + i`.

        Args:
            references: files of each image's references; all images have as many, of the same
                sizes.
            controls: URLs of N control pictures, which a model with a ControlNet follows.
        """

    def errors(self, batch: StepBatch) -> NDArray[np.float32]:
        """Unweighted mean squared error per sample [B]."""

    def compile_seconds(self) -> float:
        """Compile time so far, in seconds; 0 on a runtime that does not compile."""
