"""Gradient clipping, AdamW and EMA, as part of the compiled step.

The rule is that of torch.optim.AdamW (arXiv 1711.05101). Numbers that change with each step
(learning rate, bias corrections, share of the EMA) are inputs, so all steps run one program.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch_xla

from configs.settings.train import Train
from runtimes.contract import Owners, SavedState, State, StateShapes
from runtimes.optimizer_step.ema_swap import swapped
from runtimes.optimizer_step.step_scalars import learning_rate_factors, step_scalars
from runtimes.optimizer_step.training_state_copies import owned_copies, read_state_arrays, shapes_of
from runtimes.xla.mesh import Mesh

Parameters = Mapping[str, torch.nn.Parameter]


class Update:
    """AdamW on float32 masters that are sharded over a mesh.

    Args:
        parameters: trained parameters by State's keys, on the devices.
        settings: learning rates, AdamW, clipping and EMA.
        mesh: of the devices.
    """

    def __init__(self, parameters: Parameters, settings: Train, mesh: Mesh) -> None:
        self._parameters = parameters
        self._settings = settings
        self._mesh = mesh
        self._first = {name: self._zeros(p) for name, p in parameters.items()}
        self._second = {name: self._zeros(p) for name, p in parameters.items()}
        self._average: dict[str, torch.Tensor] = {}
        if settings.ema_decay is not None:
            self._average = {n: mesh.shard(mesh.fetch(p).clone()) for n, p in parameters.items()}
        self._shares = learning_rate_factors(parameters, settings)
        self._step = 0

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        return self._mesh.shard(torch.zeros(like.shape, dtype=torch.float32))

    @torch.no_grad()
    def apply(self, learning_rate: float) -> torch.Tensor:
        """Clip the gradients, update the weights and the EMA, and clear the gradients.

        Args:
            learning_rate: of the denoiser.

        Returns:
            The global L2 norm of the gradients before clipping, a scalar on the device.
        """
        given = self._settings
        scalars = torch.from_numpy(step_scalars(self._step, learning_rate, given))
        rate, step_size, root, ema_share = scalars.to(torch_xla.device()).unbind()
        gradients = {n: p.grad for n, p in self._parameters.items() if p.grad is not None}
        norm = torch.stack([g.float().square().sum() for g in gradients.values()]).sum().sqrt()
        factor = None
        if given.max_grad_norm is not None:
            factor = (given.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        beta1, beta2 = given.adam_betas
        for name, gradient in gradients.items():
            parameter, first, second = self._parameters[name], self._first[name], self._second[name]
            gradient = gradient if factor is None else gradient * factor
            share = self._shares[name]
            first.lerp_(gradient, 1 - beta1)
            second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            parameter.sub_(parameter * (rate * (share * given.weight_decay)))
            change = first / (second.sqrt() / root + given.adam_epsilon)
            parameter.sub_(change * (step_size * share))
            parameter.grad = None
        for name, average in self._average.items():
            average.add_((self._parameters[name] - average) * ema_share)
        self._step += 1
        return norm

    def averaged(self) -> AbstractContextManager[None]:
        """Within the context, the model has the EMA weights, if any. Raises WeightsLost."""
        return swapped(self._swap, self._swap)

    def _swap(self) -> None:
        for name, average in self._average.items():
            parameter = self._parameters[name]
            self._average[name], parameter.data = parameter.data, average

    def shapes(self) -> StateShapes:
        """Shapes of weights, moments and EMA."""
        return shapes_of(self.tensors())

    def state(self, owners: Owners | None, rank: int) -> State:
        """As Runtime.state: weights, moments and EMA. Collective."""
        return owned_copies(
            self.tensors(),
            owners,
            rank,
            copy=lambda tensor: self._mesh.copy_to_host(tensor).numpy(),
            gather=lambda name, tensor: self._mesh.gather(tensor),
        )

    def restore(self, state: SavedState, step: int) -> None:
        """Restore a state that was saved after `step` steps.

        Raises:
            WrongInput: the state has other names or shapes than this model.
        """
        groups = self.tensors()
        torch_xla.sync()  # shardings are known afterwards

        def needed(name: str, shape: tuple[int, ...]) -> Any:
            return self._mesh.local_rows(self._parameters[name])

        for group, name, rows in read_state_arrays(state, self.shapes(), needed):
            self._mesh.load_rows(groups[group][name], torch.from_numpy(rows))
        self._step = step

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors of State on the devices, not copies."""
        groups: dict[str, dict[str, torch.Tensor]] = {
            "weights": dict(self._parameters),
            "exp_avg": self._first,
            "exp_avg_sq": self._second,
        }
        return groups | ({"ema": self._average} if self._average else {})
