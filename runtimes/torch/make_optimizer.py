"""AdamW, Adafactor and 8-bit AdamW, with their state as named tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from configs.settings.train import Train
from runtimes.learning_rate import learning_rate_groups
from runtimes.torch import gaudi

Tensors = dict[str, torch.Tensor]
Parameters = Mapping[str, torch.nn.Parameter]


class Optimizer:
    """A torch optimizer with state that exists before the first step and can be saved.

    Args:
        parameters: trained parameters by State's keys, on their device.
        settings: optimizer, learning rates, betas, epsilon and weight decay.
        frees_gradients: whether a cleared gradient is None instead of zeros.
    """

    def __init__(self, parameters: Parameters, settings: Train, *, frees_gradients: bool) -> None:
        self._frees_gradients = frees_gradients
        kind = _kind(settings, next(iter(parameters.values())).device)
        self._parameters = parameters
        self._state_names = kind.state_names
        self._count = kind.count
        groups = [
            {"params": [parameters[name] for name in names], "rate": rate}
            for names, rate in learning_rate_groups(parameters, settings)
        ]
        self._torch = kind.make(groups, settings)
        for at, group in enumerate(self._torch.param_groups):
            for index, parameter in enumerate(group["params"]):
                kind.start(self._torch, parameter, at, index)
        self.set_step(0)

    def step(self, learning_rate: float) -> None:
        """Update the parameters and clear their gradients.

        Args:
            learning_rate: the denoiser's; text encoders scale it by their group's `rate`.
        """
        for group in self._torch.param_groups:
            group["lr"] = learning_rate * group["rate"]
        self._torch.step()
        self._torch.zero_grad(set_to_none=self._frees_gradients)

    def set_step(self, step: int) -> None:
        """Set the step count of every parameter, which bias corrections use."""
        for parameter in self._parameters.values():
            self._torch.state[parameter]["step"] = self._count(step, parameter)

    def state_tensors(self) -> dict[str, Tensors]:
        """The optimizer's own tensors, not copies: state name to State's key to tensor."""
        states: dict[str, Tensors] = {}
        for group in self._state_names:
            held = ((n, self._torch.state[p].get(group)) for n, p in self._parameters.items())
            states[group] = {name: tensor for name, tensor in held if tensor is not None}
        return {group: tensors for group, tensors in states.items() if tensors}


@dataclass(frozen=True)
class _Kind:
    """Functions that construct one optimizer and its initial state."""

    make: Callable[[list[dict[str, Any]], Train], Any]  # (parameter groups, settings)
    start: Callable[[Any, torch.nn.Parameter, int, int], None]  # initializes one parameter's state
    count: Callable[[int, torch.nn.Parameter], Any]  # step count in the optimizer's own type
    state_names: tuple[str, ...]


def _kind(settings: Train, device: torch.device) -> _Kind:
    kind = _KINDS[settings.optimizer]
    if device.type == "hpu" and settings.optimizer == "adamw":
        count = _count if gaudi.counts_steps_on_host(settings) else _count_on_device
        return replace(kind, make=gaudi.adamw, count=count)
    if device.type == "npu" and settings.optimizer == "adamw":
        return replace(kind, count=_count_on_host)  # the unfused step reads the count on the host
    return kind


def _adamw(groups: list[dict[str, Any]], settings: Train) -> torch.optim.Optimizer:
    # torch_npu has no fused kernel. fused=None selects the foreach kernels, fused=False a loop.
    fused = None if groups[0]["params"][0].device.type == "npu" else True
    return torch.optim.AdamW(groups, fused=fused, **_like_adam(settings))


def _like_adam(settings: Train) -> dict[str, Any]:
    return {
        "betas": settings.adam_betas,
        "eps": settings.adam_epsilon,
        "weight_decay": settings.weight_decay,
    }


def _start_adamw(optimizer: Any, parameter: torch.nn.Parameter, at: int, index: int) -> None:
    for moment in ("exp_avg", "exp_avg_sq"):
        optimizer.state[parameter][moment] = torch.zeros_like(parameter.detach())


def _count_on_device(step: int, parameter: torch.nn.Parameter) -> torch.Tensor:
    """One tensor per parameter, on the device, as the fused kernel requires."""
    return torch.tensor(float(step), dtype=torch.float32, device=parameter.device)


def _adafactor(groups: list[dict[str, Any]], settings: Train) -> torch.optim.Optimizer:
    """Adafactor (arXiv 1804.04235) without a first moment, at the learning rate of the settings.

    The paper's rate, and PyTorch's, is relative to a weight's size. A LoRA's `up` starts at 0.
    """
    from transformers.optimization import Adafactor

    absolute = {"scale_parameter": False, "relative_step": False}
    return Adafactor(groups, weight_decay=settings.weight_decay, **absolute)


def _start_adafactor(optimizer: Any, parameter: torch.nn.Parameter, at: int, index: int) -> None:
    """Second moments per row and per column of the last two dimensions; unfactored for vectors."""
    state = optimizer.state[parameter]
    shape = parameter.shape
    if len(shape) > 1:
        state["exp_avg_sq_row"] = parameter.new_zeros(shape[:-1]).detach()
        state["exp_avg_sq_col"] = parameter.new_zeros(shape[:-2] + shape[-1:]).detach()
    else:
        state["exp_avg_sq"] = torch.zeros_like(parameter.detach())


def _count_on_host(step: int, parameter: torch.nn.Parameter) -> torch.Tensor:
    return torch.tensor(float(step), dtype=torch.float32)


def _adamw_8bit(groups: list[dict[str, Any]], settings: Train) -> Any:
    from bitsandbytes.optim import AdamW8bit

    optimizer = AdamW8bit(groups, **_like_adam(settings))
    optimizer.check_overrides()
    return optimizer


def _start_adamw_8bit(optimizer: Any, parameter: torch.nn.Parameter, at: int, index: int) -> None:
    optimizer.init_state(optimizer.param_groups[at], parameter, at, index)


def _count(step: int, parameter: torch.nn.Parameter) -> int:
    return step


_KINDS = {
    "adamw": _Kind(_adamw, _start_adamw, _count_on_device, ("exp_avg", "exp_avg_sq")),
    "adafactor": _Kind(
        *(_adafactor, _start_adafactor, _count), ("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq")
    ),
    # 8-bit codes and the scale of each block (arXiv 2110.02861); small tensors stay float32.
    "adamw_8bit": _Kind(
        _adamw_8bit, _start_adamw_8bit, _count, ("state1", "state2", "absmax1", "absmax2")
    ),
}
