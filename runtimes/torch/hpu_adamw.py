"""AdamW for weights on a Gaudi: Habana's fused optimizer by PyTorch's rule, or PyTorch's own."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from configs.settings.train import Train
from runtimes.torch.hpu import BRIDGE, fused_kernel, mode, to_device


def counts_steps_on_host(settings: Train) -> bool:
    """Whether the optimizer from `adamw` counts steps in Python, not on the device."""
    return settings.hpu.fused and fused_kernel("optimizers", "FusedAdamW") is not None


def adamw(groups: list[dict[str, Any]], settings: Train) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) for weights on a Gaudi.

    Habana's FusedAdamW is used if it is available and `train.hpu.fused` is on, else PyTorch's AdamW
    with its scalars on the device. In lazy mode a step of either one is a separate graph.

    Args:
        groups: parameter groups of torch.optim, with `rate`, the group's learning rate factor.
        settings: betas, epsilon, weight decay and `hpu`.
    """
    like = {"betas": settings.adam_betas, "eps": settings.adam_epsilon}
    if counts_steps_on_host(settings):
        kind = _as_pytorch(fused_kernel("optimizers", "FusedAdamW"))
        return kind(groups, decay=settings.weight_decay, weight_decay=0.0, **like)
    return _OnDevice(
        groups,
        lr=torch.tensor(settings.learning_rate, device="hpu"),
        weight_decay=settings.weight_decay,
        foreach=True,
        capturable=True,
        **like,
    )


class _OnDevice(torch.optim.AdamW):
    """torch.optim.AdamW with learning rate and step count on the device."""

    def step(self, closure: Any = None) -> None:
        if mode() == "lazy":
            import_module(f"{BRIDGE}.core").mark_step()
        for group in self.param_groups:
            group["lr"] = to_device(float(group["lr"]))
        super().step(closure)


def _as_pytorch(fused: Any) -> Any:
    """A subclass of FusedAdamW that computes PyTorch's update and does not recompile each step.

    * FusedAdamW's weight decay is a Python number, which changes with the learning rate and would
      recompile the lazy graph. Weights are decayed before the fused step instead.
    * FusedAdamW does not apply the bias correction to epsilon. With c = 1 / sqrt(1 - beta2^s), the
      inputs (c g, c m, c^2 v) in place of gradient g and moments m and v make its update
      lr sqrt(1 - beta2^s) / (1 - beta1^s) * c m / (sqrt(c^2 v) + epsilon) equal to PyTorch's.
    * FusedAdamW counts steps per group; State has one count per parameter.
    """

    class AsPyTorch(fused):
        def __init__(self, groups: Any, *, decay: float, **more: Any) -> None:
            super().__init__(groups, **more)
            self._decay = decay

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            scaled = [self._scale(group) for group in self.param_groups]
            super().step(closure)
            for group, (scale, first, second) in zip(self.param_groups, scaled, strict=True):
                if first:
                    torch._foreach_mul_(first, to_device(1 / scale))
                    torch._foreach_mul_(second, to_device(scale**-2))
                for parameter in group["params"]:
                    self.state[parameter]["step"] = group["step"]

        def _scale(self, group: dict[str, Any]) -> tuple[float, list[Any], list[Any]]:
            """Decay weights, scale gradients and moments; returns c and both lists of moments."""
            done = group["step"] = self.state[group["params"][0]]["step"]
            scale = (1 - group["betas"][1] ** (done + 1)) ** -0.5
            given = [p for p in group["params"] if p.grad is not None]
            first, second = (
                [self.state[p][moment] for p in given] for moment in ("exp_avg", "exp_avg_sq")
            )
            if given:
                if self._decay:
                    torch._foreach_mul_(given, to_device(1.0 - self._decay * group["lr"]))
                factor = to_device(scale)
                torch._foreach_mul_([p.grad for p in given], factor)
                torch._foreach_mul_(first, factor)
                torch._foreach_mul_(second, to_device(scale**2))
            return scale, first, second

    return AsPyTorch
