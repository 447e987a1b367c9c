"""Adapt diffusers' models to PyTorch/XLA, so that a step stays one graph.

PyTorch/XLA falls back to the host for operators that it lacks, which splits the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.upsampling import Upsample2D
from torch.utils._pytree import tree_map_only
from torch_xla.utils.checkpoint import checkpoint


def replace_nearest_upsampling(model: torch.nn.Module) -> None:
    """Replace nearest upsampling in a model by repeated rows and columns.

    On a CPU, XLA lacks the gradient of `upsample_nearest2d`.
    """
    for module in model.modules():
        if isinstance(module, Upsample2D) and module.interpolate and module.norm is None:
            module.interpolate = False
            module.register_forward_pre_hook(_upsample)


def recompute(model: Any, device: torch.device) -> None:
    """Enable gradient checkpointing in a component by torch_xla.utils.checkpoint.

    PyTorch's own checkpoint saves a random state that XLA devices lack. torch_xla's is reentrant:
    it computes gradients only if an input requires them, and inputs of a frozen model's first
    layers do not. A zero that requires gradients is therefore added to the inputs and outputs.
    """

    def call(module: Any, *arguments: Any) -> Any:
        zero = torch.zeros((), device=device, requires_grad=torch.is_grad_enabled())

        def run(zero: torch.Tensor, *given: Any) -> Any:
            return tree_map_only(torch.Tensor, lambda t: t + zero.to(t.dtype), module(*given))

        return checkpoint(run, zero, *arguments, use_reentrant=True)

    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=call)


def _upsample(module: Any, arguments: tuple[Any, ...]) -> tuple[torch.Tensor]:
    """Upsample the input [B, C, h, w] of an Upsample2D to its output size."""
    inputs, size = arguments[0], arguments[1] if len(arguments) > 1 else None
    batch, channels, height, width = inputs.shape
    if size is None or tuple(size) == (2 * height, 2 * width):
        twice = inputs[:, :, :, None, :, None].expand(batch, channels, height, 2, width, 2)
        return (twice.reshape(batch, channels, 2 * height, 2 * width),)
    rows, columns = (
        torch.arange(wanted, device=inputs.device) * there // wanted
        for wanted, there in zip(size, (height, width), strict=True)
    )
    return (inputs.index_select(2, rows).index_select(3, columns),)
