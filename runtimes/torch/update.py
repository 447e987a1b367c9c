"""The update rule: clipping, AdamW and the weight average, with state that goes in and out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from configs.training import Train
from runtimes.base import State, WrongInput

Parameters = Mapping[str, torch.nn.Parameter]


class Update:
    """AdamW (decoupled decay, bias-corrected; arXiv 1711.05101) on float32 masters, and their EMA.

    The EMA's decay at step s (from 0) is min(ema_decay, (1 + s) / (10 + s)), so that the first
    steps do not average in the base for ever.
    """

    def __init__(self, parameters: Parameters, settings: Train) -> None:
        self._parameters, self._settings = parameters, settings
        self._masters: list[torch.Tensor] = list(parameters.values())
        self._optimizer = torch.optim.AdamW(
            self._masters,
            betas=settings.betas,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._average: list[torch.Tensor] | None = None
        if settings.ema_decay is not None:
            self._average = [p.detach().clone() for p in self._masters]
        self._set_step(0)
        for parameter in self._masters:
            for moment in ("exp_avg", "exp_avg_sq"):
                self._optimizer.state[parameter][moment] = torch.zeros_like(parameter.detach())

    def _set_step(self, step: int) -> None:
        self._step = step
        for parameter in self._masters:
            # A tensor of its own for each, on the device: what the fused kernel counts in.
            count = torch.tensor(float(step), dtype=torch.float32, device=parameter.device)
            self._optimizer.state[parameter]["step"] = count

    def apply(self, learning_rate: float) -> torch.Tensor:
        """Clip the gradients, update, forget them. Returns their L2 norm before clipping."""
        gradients = [p.grad for p in self._masters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        if (most := self._settings.max_grad_norm) is not None:
            torch.nn.utils.clip_grads_with_norm_(self._masters, most, norm, foreach=True)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._average is not None and self._settings.ema_decay is not None:
            decay = min(self._settings.ema_decay, (1 + self._step) / (10 + self._step))
            with torch.no_grad():
                torch._foreach_lerp_(self._average, self._masters, 1 - decay)
        self._step += 1
        return norm

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within, the model has the averaged weights, if an average is kept; nothing is copied."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for parameter, average in zip(self._masters, self._average or (), strict=False):
            parameter.data, average.data = average.data, parameter.data

    def state(self) -> State:
        """Copies of everything that the next step depends on, but the step's number."""
        return {
            group: {name: _copy(tensor) for name, tensor in tensors.items()}
            for group, tensors in self._tensors().items()
        }

    def restore(self, state: State, step: int) -> None:
        """Continue as after `step` steps. Raises WrongInput if the state is of another model."""
        for group, tensors in self._tensors().items():
            given = state.get(group, {})
            if given.keys() != tensors.keys():
                raise WrongInput(f"the checkpoint's {group} does not have this model's weights")
            for name, tensor in tensors.items():
                if given[name].shape != tuple(tensor.shape):
                    raise WrongInput(f"the checkpoint's {group} has another shape for {name}")
                with torch.no_grad():
                    tensor.copy_(torch.from_numpy(given[name]))
        self._set_step(step)

    def _tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        names = list(self._parameters)
        groups = {"weights": dict(zip(names, (p.detach() for p in self._masters), strict=True))}
        for moment in ("exp_avg", "exp_avg_sq"):
            held = (self._optimizer.state[p][moment] for p in self._masters)
            groups[moment] = dict(zip(names, held, strict=True))
        if self._average is not None:
            groups["ema"] = dict(zip(names, self._average, strict=True))
        return groups


def _copy(tensor: torch.Tensor) -> NDArray[np.float32]:
    return tensor.to("cpu", memory_format=torch.contiguous_format, copy=True).numpy()
