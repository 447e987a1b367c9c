"""FusedClipNorm by its documented rule, out of PyTorch's operators."""

from collections.abc import Iterable
from typing import Any

import torch

from habana_frameworks.torch.core import mark_step


class FusedClipNorm:
    """Scales gradients in place so that their L2 norm is at most `max_norm`."""

    def __init__(self, parameters: Iterable[Any], max_norm: float) -> None:
        self._most = torch.tensor([max_norm]).to("hpu")

    @torch.no_grad()
    def clip_norm(self, parameters: Iterable[Any]) -> torch.Tensor:
        """Returns what the norm was [1]."""
        mark_step()
        gradients = [p.grad for p in parameters if p.grad is not None]
        norms = torch.stack([torch.linalg.vector_norm(g) for g in gradients])
        total = torch.linalg.vector_norm(norms).reshape(1)
        share = torch.clamp(self._most / (total + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(share)
        mark_step()
        return total
