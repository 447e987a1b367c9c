"""One training step: forward and backward pass of each micro-batch and the update, as one graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import torch
import torch_xla

from configs.settings.train import Train
from runtimes.contract import StepBatch, StepOutput, lazy_output
from runtimes.torch_models.layer_dropout_seed import has_dropout, seed_dropout
from runtimes.torch_models.micro_batches import Inputs, micro_batches
from runtimes.torch_models.network import Network
from runtimes.xla.clip_update_and_ema import Update
from runtimes.xla.mesh import Mesh


@dataclass(frozen=True)
class Step:
    """The training step of a network on a mesh.

    Args:
        network: on the devices.
        update: of its trained parameters.
        mesh: of the devices.
        settings: micro-batch size, compute dtype and seed.
    """

    network: Network
    update: Update
    mesh: Mesh
    settings: Train

    def __call__(self, batch: StepBatch, learning_rate: float) -> StepOutput:
        losses = []
        for inputs in batch.on_device or self.inputs(batch):
            if self._has_dropout:
                # Rank 0 on every host: SPMD hosts run one program and must draw equal masks.
                seed_dropout(self.settings.seed, batch.step, inputs.first, rank=0)
                torch_xla.manual_seed(torch.initial_seed() % 2**63)
            with self.autocast():
                errors = inputs.errors(self.network)
            loss = (inputs.weight * errors).sum() / batch.denominator
            loss.backward()
            losses.append(loss.detach())
        figures = torch.stack([torch.stack(losses).sum(), self.update.apply(learning_rate)])
        torch_xla.sync()  # starts the step and does not wait for it
        return lazy_output(lambda: list(self.mesh.fetch(figures).tolist()))

    def inputs(self, batch: StepBatch) -> Iterator[Inputs]:
        """The batch's micro-batches, sharded over the devices."""
        return micro_batches(batch, self.settings.micro_batch_size, self.mesh.shard_rows)

    def autocast(self) -> AbstractContextManager[None]:
        """Context of computation in the compute dtype."""
        half = self.settings.compute_dtype == "bfloat16"
        return torch.autocast("xla", dtype=torch.bfloat16, enabled=half)

    @cached_property
    def _has_dropout(self) -> bool:
        return has_dropout(self.network)
