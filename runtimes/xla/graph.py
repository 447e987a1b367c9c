"""What diffusers' models need to stay one graph: XLA hands back to the host what it lacks."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.upsampling import Upsample2D
from torch.utils._pytree import tree_map_only
from torch_xla.utils.checkpoint import checkpoint


def replace_nearest_upsampling(model: torch.nn.Module) -> None:
    """Have a model enlarge by copying rows and columns: on a CPU, XLA lacks the gradient of
    `upsample_nearest2d`."""
    for module in model.modules():
        if isinstance(module, Upsample2D) and module.interpolate and module.norm is None:
            module.interpolate = False
            module.register_forward_pre_hook(_enlarge)


def recompute(model: Any, device: torch.device) -> None:
    """Have a part forget its activations, and compute them again in the backward pass.

    By XLA's own function: PyTorch's keeps a random state that an XLA device does not have. It gives
    gradients to what is inside only if an input and an output ask for some, which the first layers
    of a frozen model do not: so there is one input more, that is added to the outputs and is 0.
    """

    def call(module: Any, *arguments: Any) -> Any:
        zero = torch.zeros((), device=device, requires_grad=torch.is_grad_enabled())

        def run(zero: torch.Tensor, *given: Any) -> Any:
            return tree_map_only(torch.Tensor, lambda t: t + zero.to(t.dtype), module(*given))

        return checkpoint(run, zero, *arguments, use_reentrant=True)

    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=call)


def _enlarge(module: Any, arguments: tuple[Any, ...]) -> tuple[torch.Tensor]:
    """The input [B, C, h, w] of an Upsample2D at the size that it is to have."""
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
