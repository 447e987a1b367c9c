"""The optimizer step: gradient clipping, the optimizer and the EMA of the weights."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from configs.settings.train import Train
from runtimes.contract import Owners, SavedState, State, StateShapes
from runtimes.optimizer_step.ema_swap import swapped
from runtimes.optimizer_step.step_scalars import ema_decay_at
from runtimes.optimizer_step.training_state_copies import owned_copies, read_state_arrays
from runtimes.torch.device_hooks import DeviceHooks
from runtimes.torch.host_copy import HostCopies
from runtimes.torch.make_optimizer import Optimizer, Parameters, Tensors
from runtimes.torch.parallel import SingleProcess


class Update:
    """Gradient clipping, an optimizer on float32 masters, and their exponential moving average.

    optimizer_step/step_scalars.py gives the decay of the average.

    Args:
        parameters: float32 masters of this process, by State's keys.
        settings: optimizer, clipping and EMA.
        parallel: reduces norms, and gathers or shards State; None is a single process.
        device_hooks: hooks of the device; None is the CPU.

    Raises:
        WrongInput: the optimizer is not available for this device.
    """

    def __init__(
        self,
        parameters: Parameters,
        settings: Train,
        parallel: SingleProcess | None = None,
        device_hooks: DeviceHooks | None = None,
    ) -> None:
        self._parameters = parameters
        self._settings = settings
        self._parallel = parallel or SingleProcess()
        self._device_hooks = device_hooks or DeviceHooks(torch.device("cpu"))
        self._masters: list[torch.Tensor] = list(parameters.values())
        frees_gradients = self._parallel.frees_gradients
        self._optimizer = Optimizer(parameters, settings, frees_gradients=frees_gradients)
        self._average: list[torch.Tensor] | None = None
        if settings.ema_decay is not None:
            self._average = [p.detach().clone() for p in self._masters]
            # A swap must not allocate: one of them follows each out-of-memory error.
            largest = max(self._masters, key=torch.Tensor.numel)
            self._scratch = torch.empty_like(largest.detach()).flatten()
        self._step = 0

    def apply(self, learning_rate: float) -> torch.Tensor:
        """Clip the gradients, update the weights and the EMA, and clear the gradients.

        Args:
            learning_rate: of the denoiser.

        Returns:
            The global L2 norm of the gradients before clipping, a scalar on the device.
        """
        norm = self._clip()
        self._optimizer.step(learning_rate)
        self._update_average()
        self._device_hooks.mark_step()
        self._step += 1
        return norm

    def _update_average(self) -> None:
        decay = ema_decay_at(self._step, self._settings)
        if self._average is None or decay == 1:
            return
        share: Any = self._device_hooks.scalar(1 - decay)
        if isinstance(share, torch.Tensor):
            share = [share] * len(self._average)
        with torch.no_grad():
            torch._foreach_lerp_(self._average, self._masters, share)

    def _clip(self) -> torch.Tensor:
        most = self._settings.max_grad_norm
        norm = None if most is None else self._device_hooks.clip_grad_norm(self._masters, most)
        if norm is not None:
            return norm
        foreach = self._device_hooks.foreach
        norm = self._parallel.total_norm(self._masters, foreach=foreach)
        if most is not None and not _surely_below(most, norm):
            torch.nn.utils.clip_grads_with_norm_(self._masters, most, norm, foreach=foreach)
        return norm

    def averaged(self) -> AbstractContextManager[None]:
        """Within the context, the model has the EMA weights, if any. Raises WeightsLost."""
        return swapped(self._swap, self._swap)

    def _swap(self) -> None:
        """Swap weights and EMA in place: FSDP's modules refer to the memory of their shards."""
        for parameter, average in zip(self._masters, self._average or (), strict=False):
            kept = self._scratch[: parameter.numel()].view(parameter.shape)
            kept.copy_(parameter.detach())
            parameter.data.copy_(average)
            average.copy_(kept)

    def shapes(self) -> StateShapes:
        """Shapes of the full arrays of weights, optimizer state and EMA."""
        return {
            group: {name: self._parallel.full_shape(name, t) for name, t in tensors.items()}
            for group, tensors in self._tensors().items()
        }

    def state(self, owners: Owners | None = None, rank: int = 0) -> State:
        """As Runtime.state: weights, optimizer state and EMA. Collective."""
        copies = HostCopies(self._masters[0].device)
        gather = self._parallel.gather_full
        state = owned_copies(self._tensors(), owners, rank, copies.copy, gather)
        copies.finish()
        return state

    def restore(self, state: SavedState, step: int) -> None:
        """Restore a state that was saved after `step` steps.

        Raises:
            WrongInput: the state has other names or shapes than this model.
        """
        groups = self._tensors()
        with torch.no_grad():
            for group, name, rows in read_state_arrays(
                state, self.shapes(), self._parallel.local_rows
            ):
                groups[group][name].copy_(torch.from_numpy(rows))
        self._step = step
        self._optimizer.set_step(step)

    def _tensors(self) -> dict[str, Tensors]:
        groups = {"weights": {name: p.detach() for name, p in self._parameters.items()}}
        groups |= self._optimizer.state_tensors()
        if self._average is not None:
            groups["ema"] = dict(zip(self._parameters, self._average, strict=True))
        return groups


def _surely_below(most: float, norm: torch.Tensor) -> bool:
    """Whether clipping is known to have no effect. Only a CPU is asked: reading a device's norm
    would wait for the device."""
    return norm.device.type == "cpu" and float(norm) + 1e-6 < most  # torch adds the same 1e-6
