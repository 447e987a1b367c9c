"""The optimizers to choose from, each with what it remembers as named tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

from configs.training import Train
from runtimes.contract import WrongInput
from runtimes.torch import hpu

Tensors = dict[str, torch.Tensor]
Parameters = Mapping[str, torch.nn.Parameter]


class Optimizer:
    """A torch optimizer whose memory is there from the start, and goes in and out.

    Args:
        parameters: what is updated; the text encoders' may have a learning rate of their own.

    Raises:
        WrongInput: the optimizer is not to be had here; the message says what to do.
    """

    def __init__(self, parameters: Parameters, settings: Train) -> None:
        kind = _kind(settings, next(iter(parameters.values())).device)
        self._parameters, self._memory, self._count = parameters, kind.memory, kind.count
        texts = {n: p for n, p in parameters.items() if n.startswith("text_encoder")}
        others = [p for n, p in parameters.items() if n not in texts]
        peak = settings.text_encoder_lr or settings.learning_rate
        groups = [{"params": others, "rate": 1.0}]
        if texts:
            groups.append({"params": list(texts.values()), "rate": peak / settings.learning_rate})
        self._torch = kind.make([g for g in groups if g["params"]], settings)
        for at, group in enumerate(self._torch.param_groups):
            for index, parameter in enumerate(group["params"]):
                kind.start(self._torch, parameter, at, index)
        self.set_step(0)

    def step(self, learning_rate: float) -> None:
        """Update by the gradients, and forget them. The rate is the denoiser's."""
        for group in self._torch.param_groups:
            group["lr"] = learning_rate * group["rate"]
        self._torch.step()
        self._torch.zero_grad(set_to_none=True)

    def set_step(self, step: int) -> None:
        """Count on from so many steps."""
        for parameter in self._parameters.values():
            self._torch.state[parameter]["step"] = self._count(step, parameter)

    def state_tensors(self) -> dict[str, Tensors]:
        """What it remembers, live: group -> parameter's name -> tensor."""
        found: dict[str, Tensors] = {}
        for group in self._memory:
            held = ((n, self._torch.state[p].get(group)) for n, p in self._parameters.items())
            found[group] = {name: tensor for name, tensor in held if tensor is not None}
        return {group: tensors for group, tensors in found.items() if tensors}


@dataclass(frozen=True)
class _Kind:
    """How to make one, and what is in its state."""

    make: Callable[[list[dict[str, Any]], Train], Any]
    start: Callable[[Any, torch.nn.Parameter, int, int], None]  # parameter, its group and number
    count: Callable[[int, torch.nn.Parameter], Any]  # its counter of steps
    memory: tuple[str, ...]


def _kind(settings: Train, device: torch.device) -> _Kind:
    kind = _KINDS[settings.optimizer]
    if device.type == "hpu" and settings.optimizer == "adamw":
        count = _count if hpu.counts_steps_on_host(settings) else _count_on_device
        return replace(kind, make=hpu.adamw, count=count)
    if device.type == "npu" and settings.optimizer == "adamw":
        return replace(kind, count=_count_on_host)  # which is read at every step
    return kind


def _adamw(groups: list[dict[str, Any]], settings: Train) -> torch.optim.Optimizer:
    # torch_npu has no fused kernel. None has PyTorch take lists of tensors, False one by one.
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
    """A tensor of its own for each, on the device: what the fused kernel counts in."""
    return torch.tensor(float(step), dtype=torch.float32, device=parameter.device)


def _adafactor(groups: list[dict[str, Any]], settings: Train) -> torch.optim.Optimizer:
    """PyTorch's: without first moment; the rate is relative to a weight's size, as in the paper."""
    return torch.optim.Adafactor(groups, weight_decay=settings.weight_decay)


def _start_adafactor(optimizer: Any, parameter: torch.nn.Parameter, at: int, index: int) -> None:
    """Second moments by row and by column of the last two dimensions; whole for vectors."""
    state, shape = optimizer.state[parameter], parameter.shape
    if len(shape) > 1:
        state["row_var"] = parameter.new_zeros((*shape[:-1], 1)).detach()
        state["col_var"] = parameter.new_zeros((*shape[:-2], 1, shape[-1])).detach()
    else:
        state["variance"] = torch.zeros_like(parameter.detach())


def _count_on_host(step: int, parameter: torch.nn.Parameter) -> torch.Tensor:
    return torch.tensor(float(step), dtype=torch.float32)


def check_optimizer(settings: Train, device: torch.device) -> None:
    """Raise WrongInput for an optimizer that is not to be had for weights on a device."""
    if settings.optimizer != "adamw_8bit":
        return
    if device.type != "cuda":
        raise WrongInput("train.optimizer: adamw_8bit needs a CUDA device; take adamw or adafactor")
    if find_spec("bitsandbytes") is None:
        raise WrongInput("train.optimizer: adamw_8bit needs bitsandbytes: pip install bitsandbytes")


def _adamw_8bit(groups: list[dict[str, Any]], settings: Train) -> Any:
    check_optimizer(settings, groups[0]["params"][0].device)
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
        _adafactor, _start_adafactor, _count_on_host, ("row_var", "col_var", "variance")
    ),
    # Codes of 8 bits and, of each block, what they are scaled by; small tensors are kept whole.
    "adamw_8bit": _Kind(
        _adamw_8bit, _start_adamw_8bit, _count, ("state1", "state2", "absmax1", "absmax2")
    ),
}
