"""One training step: forward and backward pass of each micro-batch, then the update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import torch

from configs.settings.train import Train
from runtimes.contract import StepBatch, StepOutput, WrongInput
from runtimes.torch.attention import attention_kernel
from runtimes.torch.clip_update_and_ema import Update
from runtimes.torch.cuda_graphs import CudaGraphs
from runtimes.torch.device_hooks import DeviceHooks
from runtimes.torch.parallel import SingleProcess
from runtimes.torch_models.layer_dropout_seed import has_dropout, seed_dropout
from runtimes.torch_models.micro_batches import Inputs, micro_batches, sender
from runtimes.torch_models.network import Network


@dataclass(frozen=True)
class Step:
    """The training step of a network on its device.

    Args:
        network: the trained network.
        forward: the network as `parallel` wraps it.
        update: of the masters.
        parallel: of the run's processes.
        device_hooks: hooks of the device.
        settings: micro-batch size, compute dtype and seed.
        rank: of this process.
    """

    network: Network
    forward: Callable[..., torch.Tensor]
    update: Update
    parallel: SingleProcess
    device_hooks: DeviceHooks
    settings: Train
    rank: int

    def __post_init__(self) -> None:
        """Raise WrongInput where CUDA graphs are set and the step cannot be captured."""
        if not self.settings.cuda_graphs:
            return
        if self._has_dropout:
            raise WrongInput("train.cuda_graphs: this model has dropout; set false")
        if self.parallel.world > 1:  # torchrun and mpirun ignore train.processes
            raise WrongInput("train.cuda_graphs is for one process; set false")

    def __call__(self, batch: StepBatch, learning_rate: float) -> StepOutput:
        loss = torch.zeros((), device=self.device_hooks.device)
        for inputs in batch.on_device or self.inputs(batch):
            if self._has_dropout:
                seed_dropout(self.settings.seed, batch.step, inputs.first, self.rank)
            with self.parallel.accumulating(last=inputs.last):
                loss += self._pass(inputs, batch.denominator)
            if not inputs.last:
                self.device_hooks.mark_step()
        self.parallel.gather_gradients()
        return StepOutput(self.parallel.sum_over_ranks(loss), self.update.apply(learning_rate))

    def backward(self, inputs: Inputs, denominator: int) -> torch.Tensor:
        """Add a micro-batch's gradients to those of the parameters.

        Args:
            inputs: the micro-batch.
            denominator: as in StepBatch.

        Returns:
            The micro-batch's part of the loss, a scalar.
        """
        # The backward pass recomputes blocks, by the same kernel.
        with attention_kernel(self.settings.attention):
            with self.autocast():
                errors = inputs.errors(self.forward)
            part = (inputs.weight * errors).sum() / denominator
            # DDP and FSDP average gradients over processes; the step needs their sum.
            (part * self.parallel.world).backward()
        return part.detach()

    def release_graphs(self) -> None:
        """Free the memory of CUDA graphs, if there are any. Between steps only."""
        if isinstance(self._pass, CudaGraphs):
            self._pass.release()

    def inputs(self, batch: StepBatch) -> Iterator[Inputs]:
        """The batch's micro-batches, copied to the device."""
        return micro_batches(
            batch, self.settings.micro_batch_size, sender(self.device_hooks.device)
        )

    def autocast(self) -> AbstractContextManager[None]:
        """Context of computation in the compute dtype."""
        dtype = getattr(torch, self.settings.compute_dtype)
        enabled = dtype != torch.float32
        return torch.autocast(
            self.device_hooks.device.type,
            dtype if enabled else None,
            enabled=enabled,
            cache_enabled=self.device_hooks.autocast_caches_casts,
        )

    @cached_property
    def _pass(self) -> Callable[[Inputs, int], torch.Tensor]:
        if not self.settings.cuda_graphs:
            return self.backward
        return CudaGraphs(self.network, self.backward)

    @cached_property
    def _has_dropout(self) -> bool:
        return has_dropout(self.network)
