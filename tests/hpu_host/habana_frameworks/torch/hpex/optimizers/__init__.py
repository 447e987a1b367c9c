"""FusedAdamW by its documented rule, out of PyTorch's operators."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from hpu_emulator import graphs

from habana_frameworks.torch.core import mark_step


class FusedAdamW(torch.optim.Optimizer):
    """AdamW with bias correction in the step size alone: epsilon is added to a second moment that
    is not corrected. In lazy mode the decay is a number of the graph, in eager mode data."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update."""
        for group in self.param_groups:
            mark_step()
            given = [p for p in group["params"] if p.grad is not None]
            if not given:
                continue
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            size = group["lr"]
            if group["bias_correction"]:
                size *= math.sqrt(1 - beta2 ** group["step"]) / (1 - beta1 ** group["step"])
            step = torch.tensor([-size]).to("hpu", non_blocking=True)
            kept: Any = 1.0 - group["weight_decay"] * group["lr"]
            if not graphs.lazy():
                kept = torch.tensor([kept]).to("hpu", non_blocking=True)
            for parameter in given:
                state = self.state[parameter]
                if not state:
                    state.update(
                        step=0,
                        exp_avg=torch.zeros_like(parameter),
                        exp_avg_sq=torch.zeros_like(parameter),
                    )
                first, second, gradient = state["exp_avg"], state["exp_avg_sq"], parameter.grad
                first.mul_(beta1).add_(gradient, alpha=1 - beta1)
                second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                parameter.mul_(kept)
                parameter.add_(first / second.sqrt().add_(group["eps"]) * step)
        mark_step()
