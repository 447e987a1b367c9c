"""The optimizers of runtime torch, with their state as named tensors and numbers."""

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
Groups = list[dict[str, Any]]  # torch.optim's parameter groups, with `rate` and `names`


class Optimizer:
    """Torch optimizers with state that exists before the first step and can be saved.

    Args:
        parameters: trained parameters by State's keys, on their device.
        settings: optimizer, learning rates, betas, epsilon and weight decay.
        frees_gradients: whether a cleared gradient is None instead of zeros.
    """

    def __init__(self, parameters: Parameters, settings: Train, *, frees_gradients: bool) -> None:
        self._frees_gradients = frees_gradients
        self._kind = _kind(settings, next(iter(parameters.values())).device)
        self._parameters = parameters
        groups = [
            {"params": [parameters[name] for name in names], "rate": rate, "names": names}
            for names, rate in learning_rate_groups(parameters, settings)
        ]
        self._optimizers = self._kind.make(groups, settings)
        self._groups = [group for made in self._optimizers for group in made.param_groups]
        self._made_of = {
            parameter: (made, group)
            for made in self._optimizers
            for group in made.param_groups
            for parameter in group["params"]
        }
        self.start()

    def start(self) -> None:
        """Set the state of step 0, in which some optimizers keep the weights as they are now."""
        for made in self._optimizers:
            for at, group in enumerate(made.param_groups):
                for index, parameter in enumerate(group["params"]):
                    self._kind.start(made, parameter, at, index)
        self.set_step(0)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the denoiser's learning rate; text encoders scale it by their group's `rate`."""
        for group in self._groups:
            group["lr"] = learning_rate * group["rate"]

    def step(self, learning_rate: float) -> None:
        """Update the parameters, at the denoiser's learning rate, and clear their gradients."""
        self.set_learning_rate(learning_rate)
        for made in self._optimizers:
            made.step()
            made.zero_grad(set_to_none=self._frees_gradients)

    def step_alone(self, parameter: torch.nn.Parameter) -> None:
        """Update one parameter and free its gradient; for optimizers without `scalars`."""
        made, group = self._made_of[parameter]
        groups = made.param_groups
        made.param_groups = [{**group, "params": [parameter]}]
        made.step()
        made.param_groups = groups
        parameter.grad = None

    def set_step(self, step: int) -> None:
        """Set the step count of every parameter, which bias corrections use."""
        for parameter in self._parameters.values():
            self._state(parameter)["step"] = self._kind.count(step, parameter)

    def state_tensors(self) -> dict[str, Tensors]:
        """The optimizer's own tensors, not copies: state name to State's key to tensor."""
        states: dict[str, Tensors] = {}
        for group in self._kind.state_names:
            held = ((n, self._state(p).get(group)) for n, p in self._parameters.items())
            states[group] = {name: tensor for name, tensor in held if tensor is not None}
        return {group: tensors for group, tensors in states.items() if tensors}

    def scalars(self) -> dict[str, float]:
        """The numbers that the optimizer keeps for a group of parameters, as `d.0`."""
        names = self._kind.scalars
        return {f"{n}.{at}": group[n] for at, group in enumerate(self._groups) for n in names}

    def set_scalars(self, scalars: Mapping[str, float]) -> None:
        """Set the numbers of `scalars`."""
        for name, value in scalars.items():
            own, _, at = name.rpartition(".")
            self._groups[int(at)][own] = value

    def _state(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self._made_of[parameter][0].state[parameter]
        return state


@dataclass(frozen=True)
class _Kind:
    """Functions that construct one optimizer and its initial state."""

    make: Callable[[Groups, Train], list[Any]]
    start: Callable[[Any, torch.nn.Parameter, int, int], None]  # initializes one parameter's state
    state_names: tuple[str, ...]
    count: Callable[[int, torch.nn.Parameter], Any]  # step count in the optimizer's own type
    scalars: tuple[str, ...] = ()  # numbers of a group that steps change


def _kind(settings: Train, device: torch.device) -> _Kind:
    kind = _KINDS[settings.optimizer]
    if device.type == "hpu":
        count = _count if gaudi.counts_steps_on_host(settings) else _count_on_device
        return replace(kind, make=_gaudi_adamw, count=count)
    if device.type == "npu" and kind.count is _count_on_device:
        return replace(kind, count=_count_on_host)  # the unfused step reads the count on the host
    return kind


def _count(step: int, parameter: torch.nn.Parameter) -> int:
    return step


def _count_on_device(step: int, parameter: torch.nn.Parameter) -> torch.Tensor:
    """One tensor per parameter, on the device, as the fused kernel requires."""
    return torch.tensor(float(step), dtype=torch.float32, device=parameter.device)


def _count_on_host(step: int, parameter: torch.nn.Parameter) -> torch.Tensor:
    return torch.tensor(float(step), dtype=torch.float32)


def _like_adam(settings: Train) -> dict[str, Any]:
    return {
        "betas": settings.adam_betas,
        "eps": settings.adam_epsilon,
        "weight_decay": settings.weight_decay,
    }


def _zeros(*names: str) -> Callable[[Any, torch.nn.Parameter, int, int], None]:
    """Starts each named state at zero, in the parameter's shape."""

    def start(optimizer: Any, parameter: torch.nn.Parameter, at: int, index: int) -> None:
        for name in names:
            optimizer.state[parameter][name] = torch.zeros_like(parameter.detach())

    return start


def _gaudi_adamw(groups: Groups, settings: Train) -> list[Any]:
    return [gaudi.adamw(groups, settings)]


def _adamw(groups: Groups, settings: Train) -> list[Any]:
    # torch_npu has no fused kernel. fused=None selects the foreach kernels, fused=False a loop.
    fused = None if groups[0]["params"][0].device.type == "npu" else True
    return [torch.optim.AdamW(groups, fused=fused, **_like_adam(settings))]


def _adafactor(groups: Groups, settings: Train) -> list[Any]:
    """Adafactor (arXiv 1804.04235) without a first moment, at the learning rate of the settings.

    The paper's rate, and PyTorch's, is relative to a weight's size. A LoRA's `up` starts at 0.
    """
    from transformers.optimization import Adafactor

    absolute = {"scale_parameter": False, "relative_step": False}
    return [Adafactor(groups, weight_decay=settings.weight_decay, **absolute)]


def _start_factors(*names: str) -> Callable[[Any, torch.nn.Parameter, int, int], None]:
    """Starts averages per row and per column of the last two dimensions.

    Vectors have the first name's average for each value.
    """

    def start(optimizer: Any, parameter: torch.nn.Parameter, at: int, index: int) -> None:
        state = optimizer.state[parameter]
        shape = parameter.shape
        if len(shape) < 2:
            state[names[0]] = torch.zeros_like(parameter.detach())
            return
        for name in names:
            state[f"{name}_row"] = parameter.new_zeros(shape[:-1]).detach()
            state[f"{name}_col"] = parameter.new_zeros(shape[:-2] + shape[-1:]).detach()

    return start


def _came(groups: Groups, settings: Train) -> list[Any]:
    """CAME (arXiv 2307.02047) with the library's three betas."""
    from came_pytorch import CAME

    return [CAME(groups, lr=settings.learning_rate, weight_decay=settings.weight_decay)]


def _start_came(optimizer: Any, parameter: torch.nn.Parameter, at: int, index: int) -> None:
    _zeros("exp_avg")(optimizer, parameter, at, index)
    _start_factors("exp_avg_sq", "exp_avg_res")(optimizer, parameter, at, index)


def _adamw_8bit(groups: Groups, settings: Train) -> list[Any]:
    from bitsandbytes.optim import AdamW8bit

    return [AdamW8bit(groups, **_like_adam(settings))]


def _lion_8bit(groups: Groups, settings: Train) -> list[Any]:
    from bitsandbytes.optim import Lion8bit

    return [Lion8bit(groups, weight_decay=settings.weight_decay)]


def _start_8bit(optimizer: Any, parameter: torch.nn.Parameter, at: int, index: int) -> None:
    # As bitsandbytes leaves it after a step: a resumed run must begin as it went on.
    parameter.data = parameter.data.contiguous()
    optimizer.init_state(optimizer.param_groups[at], parameter, at, index)


def _lion(groups: Groups, settings: Train) -> list[Any]:
    """Lion (arXiv 2302.06675) with the library's betas, which are the paper's."""
    from lion_pytorch import Lion

    return [Lion(groups, weight_decay=settings.weight_decay)]


def _prodigy(groups: Groups, settings: Train) -> list[Any]:
    """Prodigy (arXiv 2306.06101) with the arguments of diffusers' scripts."""
    from prodigyopt import Prodigy

    like = _like_adam(settings)
    # The constructor prints a line if it is given the weight decay.
    decay = {"weight_decay": like.pop("weight_decay")}
    decaying = [{**group, **decay} for group in groups]
    return [Prodigy(decaying, use_bias_correction=True, safeguard_warmup=True, **like)]


def _start_prodigy(optimizer: Any, parameter: torch.nn.Parameter, at: int, index: int) -> None:
    _zeros("exp_avg", "exp_avg_sq")(optimizer, parameter, at, index)
    flat = parameter.detach().flatten()
    optimizer.state[parameter] |= {"s": torch.zeros_like(flat), "p0": flat.clone()}


def _adamw_schedule_free(groups: Groups, settings: Train) -> list[Any]:
    """Schedule-free AdamW (arXiv 2405.15682), whose parameters stay those of training, y."""
    from schedulefree import AdamWScheduleFree

    training = [{**group, "train_mode": True} for group in groups]
    return [AdamWScheduleFree(training, **_like_adam(settings))]


def _start_schedule_free(
    optimizer: Any, parameter: torch.nn.Parameter, at: int, index: int
) -> None:
    _zeros("exp_avg_sq")(optimizer, parameter, at, index)
    optimizer.state[parameter]["z"] = parameter.detach().clone()


def _muon(groups: Groups, settings: Train) -> list[Any]:
    """Muon for hidden matrices, at AdamW's learning rate (arXiv 2502.16982); AdamW for the rest."""

    parts: dict[bool, Groups] = {True: [], False: []}
    for group in groups:
        halves: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
        for name, parameter in zip(group["names"], group["params"], strict=True):
            hidden = parameter.ndim == 2 and not name.endswith("embedding.weight")
            halves[hidden].append(parameter)
        for hidden, parameters in halves.items():
            if parameters:
                parts[hidden].append({**group, "params": parameters})
    made: list[Any] = []
    if matrices := parts[True]:
        like_adamw = {"weight_decay": settings.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        made.append(torch.optim.Muon(matrices, **like_adamw))
    if others := parts[False]:
        made += _adamw(others, settings)
    return made


def _start_muon(optimizer: Any, parameter: torch.nn.Parameter, at: int, index: int) -> None:
    is_muon = isinstance(optimizer, torch.optim.Muon)
    names = ("momentum_buffer",) if is_muon else ADAMW
    _zeros(*names)(optimizer, parameter, at, index)


ADAMW = ("exp_avg", "exp_avg_sq")
FACTORS = ("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq")
# 8-bit codes and the scale of each block (arXiv 2110.02861); small tensors stay float32.
STATES_8BIT = ("state1", "state2", "absmax1", "absmax2")
_KINDS = {
    "adamw": _Kind(_adamw, _zeros(*ADAMW), ADAMW, _count_on_device),
    "adafactor": _Kind(_adafactor, _start_factors("exp_avg_sq"), FACTORS, _count),
    "adamw_8bit": _Kind(_adamw_8bit, _start_8bit, STATES_8BIT, _count),
    "lion_8bit": _Kind(_lion_8bit, _start_8bit, STATES_8BIT, _count),
    "lion": _Kind(_lion, _zeros("exp_avg"), ("exp_avg",), _count),
    "came": _Kind(
        _came, _start_came, ("exp_avg", *FACTORS, "exp_avg_res_row", "exp_avg_res_col"), _count
    ),
    "muon": _Kind(_muon, _start_muon, ("momentum_buffer", *ADAMW), _count_on_device),
    "prodigy": _Kind(
        _prodigy,
        _start_prodigy,
        (*ADAMW, "s", "p0"),
        _count,
        scalars=("d", "d_max", "d_numerator", "k"),
    ),
    "adamw_schedule_free": _Kind(
        _adamw_schedule_free,
        _start_schedule_free,
        ("z", "exp_avg_sq"),
        _count,
        scalars=("k", "lr_max", "weight_sum"),
    ),
}
