"""Less memory for activations: micro-batches and gradient checkpointing.

Split a batch into micro-batches, and copy each to the device.

Recompute activations in the backward pass, by PyTorch's own checkpoints around each block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch.utils import checkpoint

from runtimes.contract import OPTIONAL, UNCAST, StepBatch
from runtimes.objective.training_objective import elementwise_loss

Send = Callable[[NDArray[Any]], torch.Tensor]


def sender(device: torch.device) -> Send:
    """A function that copies a host array to a device, asynchronously through pinned memory."""

    def send(array: NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if device.type != "cpu":
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    return send


def micro_batches(batch: StepBatch, size: int | None, send: Send) -> Iterator[Inputs]:
    """Yield micro-batches of at most `size` samples; None is the whole batch."""
    for first, end in batch.micro_batches(size):
        yield Inputs(batch, send, first, end)


class Inputs:
    """One micro-batch on the device: samples `first` to `end` (exclusive) of a batch.

    Args:
        batch: this rank's batch on the host.
        send: copies an array to the device.
        first: index of the first sample.
        end: index after the last sample; None is the end of the batch.
        dtype: dtype of the latents and of all conditioning that is not in `contract.UNCAST`.

    Attributes:
        first: index of the first sample.
        last: whether the micro-batch is the last of the batch.
        noisy_latents: [B, C, h, w], `dtype`.
        timesteps: [B], as in StepBatch.
        target: [B, C, h, w] f32, the objective's regression target.
        weight: [B] f32, loss weight of each sample.
        conditioning: keyword to [B, ...].
        loss_mask, huber_delta, is_prior: as in StepBatch.
        has_prior: whether a row of `is_prior` is true, known on the host.
    """

    loss_mask: torch.Tensor | None
    huber_delta: torch.Tensor | None
    is_prior: torch.Tensor | None

    def __init__(
        self,
        batch: StepBatch,
        send: Send,
        first: int = 0,
        end: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        part = slice(first, end)
        self.first = first
        self.last = end in (None, len(batch.timesteps))
        self.noisy_latents = send(batch.noisy_latents[part]).to(dtype)
        self.timesteps = send(batch.timesteps[part])
        self.target = send(batch.target[part])
        self.weight = send(batch.weight[part])
        self.conditioning = {
            name: send(array[part]) if name in UNCAST else send(array[part]).to(dtype)
            for name, array in batch.conditioning.items()
        }
        for name in OPTIONAL:
            array = getattr(batch, name)
            setattr(self, name, None if array is None else send(array[part]))
        self.has_prior = batch.is_prior is not None and bool(batch.is_prior[part].any())

    def errors(self, network: Any) -> torch.Tensor:
        """Mean loss per sample [B] f32, without loss weights."""
        prediction = network(self.noisy_latents, self.timesteps, self.conditioning)
        squares = (prediction.float() - self.target).square()
        losses: torch.Tensor = elementwise_loss(squares, self.huber_delta, self.loss_mask)
        return losses.mean(dim=(1, 2, 3))

    @torch.no_grad()
    def set_prior_targets(self, base: Any) -> None:
        """Set the targets of the rows of `is_prior`, which is not None, to a base's prediction."""
        assert self.is_prior is not None
        prediction = base(self.noisy_latents, self.timesteps, self.conditioning)
        rows = self.is_prior[:, None, None, None]
        self.target = torch.where(rows, prediction.float(), self.target)


_aten = torch.ops.aten


#: Operations whose outputs selective recomputation keeps. Products of batches (bmm) are attention's
#: logits, which are larger than all else.
KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def recompute(part: Any, what: str) -> None:
    """Enable gradient checkpointing of a component's blocks.

    Args:
        part: a model of diffusers or transformers.
        what: `train.gradient_checkpointing`, blocks or selective.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if what == "selective":
        options["context_fn"] = partial(checkpoint.create_selective_checkpoint_contexts, _policy)
    if hasattr(part, "enable_gradient_checkpointing"):  # diffusers
        part.enable_gradient_checkpointing(partial(checkpoint.checkpoint, **options))
    elif hasattr(part, "activation_checkpointing_enable"):  # transformers
        part.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:  # before transformers renamed it
        part.gradient_checkpointing_enable(options)


def without_recomputation(part: Any) -> None:
    """Disable gradient checkpointing of a component, if it is enabled."""
    if hasattr(part, "disable_gradient_checkpointing"):  # diffusers
        if part.is_gradient_checkpointing:
            part.disable_gradient_checkpointing()
    elif hasattr(part, "activation_checkpointing_disable"):  # transformers
        if part.is_activation_checkpointing:
            part.activation_checkpointing_disable()
    elif getattr(part, "is_gradient_checkpointing", False):
        part.gradient_checkpointing_disable()


def _policy(context: Any, operation: Any, *_: Any, **__: Any) -> checkpoint.CheckpointPolicy:
    policies = checkpoint.CheckpointPolicy
    return policies.MUST_SAVE if operation in KEPT else policies.PREFER_RECOMPUTE
