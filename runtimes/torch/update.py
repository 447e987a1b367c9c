"""The update: clipping, the optimizer and the weight average, with state that goes in and out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from configs.training import Train
from runtimes.contract import State, WrongInput
from runtimes.torch.device_kind import DeviceKind
from runtimes.torch.optimizers import Optimizer, Parameters, Tensors
from runtimes.torch.parallel import SingleProcess


class Update:
    """Clipping, an optimizer on float32 masters, and their exponential moving average (EMA).

    The EMA's decay at step s (from 0) is min(ema_decay, (1 + s) / (10 + s)), so that the first
    steps do not average in the base for ever.

    Raises:
        WrongInput: the optimizer is not to be had here.
    """

    def __init__(
        self,
        parameters: Parameters,
        settings: Train,
        parallel: SingleProcess | None = None,
        device_kind: DeviceKind | None = None,
    ) -> None:
        self._parameters, self._settings = parameters, settings
        self._parallel = parallel or SingleProcess()
        self._device_kind = device_kind or DeviceKind(torch.device("cpu"))
        self._masters: list[torch.Tensor] = list(parameters.values())
        self._optimizer = Optimizer(parameters, settings)
        self._average: list[torch.Tensor] | None = None
        if settings.ema_decay is not None:
            self._average = [p.detach().clone() for p in self._masters]
        self._step = 0

    def apply(self, learning_rate: float) -> torch.Tensor:
        """Clip the gradients, update, forget them. Returns their L2 norm before clipping."""
        norm = self._clip()
        self._optimizer.step(learning_rate)
        if self._average is not None and self._settings.ema_decay is not None:
            decay = min(self._settings.ema_decay, (1 + self._step) / (10 + self._step))
            share: Any = self._device_kind.scalar(1 - decay)
            if isinstance(share, torch.Tensor):
                share = [share] * len(self._average)
            with torch.no_grad():
                torch._foreach_lerp_(self._average, self._masters, share)
        self._device_kind.mark_step()
        self._step += 1
        return norm

    def _clip(self) -> torch.Tensor:
        most = self._settings.max_grad_norm
        norm = None if most is None else self._device_kind.clip_grad_norm(self._masters, most)
        if norm is not None:
            return norm
        gradients = [p.grad for p in self._masters if p.grad is not None]
        foreach = self._device_kind.foreach
        norm = torch.nn.utils.get_total_norm(gradients, foreach=foreach)
        norm = self._parallel.total_norm(norm)
        if most is not None and not _surely_below(most, norm):
            torch.nn.utils.clip_grads_with_norm_(self._masters, most, norm, foreach=foreach)
        return norm

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within, the model has the averaged weights, if an average is kept."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        """In place: the memory may be a share of what a module gathers."""
        for parameter, average in zip(self._masters, self._average or (), strict=False):
            kept = parameter.detach().clone()
            parameter.data.copy_(average)
            average.copy_(kept)

    def state(self) -> State:
        """Copies of everything that the next step depends on, but the step's number.

        On the first process; the others help to gather it, and keep nothing.
        """
        state: State = {}
        for group, tensors in self._tensors().items():
            for name, tensor in tensors.items():
                whole = self._parallel.gather_full(name, tensor)
                if self._parallel.first:
                    state.setdefault(group, {})[name] = _copy(whole)
        return state

    def restore(self, state: State, step: int) -> None:
        """Continue as after `step` steps. Raises WrongInput if the state is of another model."""
        for group, tensors in self._tensors().items():
            given = state.get(group, {})
            if given.keys() != tensors.keys():
                raise WrongInput(f"the checkpoint's {group} does not have this model's weights")
            for name, tensor in tensors.items():
                share = self._parallel.local_shard(name, torch.from_numpy(given[name]))
                if share.shape != tensor.shape:
                    raise WrongInput(f"the checkpoint's {group} has another shape for {name}")
                with torch.no_grad():
                    tensor.copy_(share)
        self._step = step
        self._optimizer.set_step(step)

    def _tensors(self) -> dict[str, Tensors]:
        groups = {"weights": {name: p.detach() for name, p in self._parameters.items()}}
        groups |= self._optimizer.state_tensors()
        if self._average is not None:
            groups["ema"] = dict(zip(self._parameters, self._average, strict=True))
        return groups


def _surely_below(most: float, norm: torch.Tensor) -> bool:
    """Whether clipping would multiply by 1. A device is not waited for to find out."""
    return norm.device.type == "cpu" and float(norm) + 1e-6 < most  # as torch adds it


def _copy(tensor: torch.Tensor) -> NDArray[np.float32]:
    whole = {"memory_format": torch.contiguous_format, "copy": True}
    return tensor.to("cpu", torch.float32, **whole).numpy()
