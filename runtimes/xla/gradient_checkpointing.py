"""Gradient checkpointing of PyTorch/XLA, with sharded weights gathered where they are used."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.func import functional_call
from torch.utils._pytree import tree_map_only
from torch_xla.utils.checkpoint import checkpoint

from runtimes.xla.mesh import Mesh


def recompute(model: Any, mesh: Mesh) -> None:
    """Recompute the activations of a component's blocks in the backward pass.

    Sharded weights are gathered layer by layer in each pass. Without this, GSPMD often gathers the
    activations of all devices instead.

    PyTorch's own checkpoint saves a random state that XLA devices lack. torch_xla's is reentrant:
    it computes gradients only if an input requires them, and inputs of a frozen model's first
    layers do not. A zero that requires gradients is therefore added to the inputs and outputs.
    """
    model._set_gradient_checkpointing(
        enable=True, gradient_checkpointing_func=partial(_checkpointed, mesh.device)
    )
    if mesh.fsdp > 1:
        for module in model.modules():
            if module._parameters:
                module.forward = partial(_with_gathered_weights, module, module.forward, mesh)


def _checkpointed(device: torch.device, block: Any, *arguments: Any) -> Any:
    """Outputs of a block, whose weights are inputs of the checkpoint.

    XLA merges equal operations on other weights, so that the gathered weights of the forward pass
    would stay in memory for the backward pass.
    """
    weights = dict(block.named_parameters()) if isinstance(block, torch.nn.Module) else {}
    zero = torch.zeros((), device=device, requires_grad=torch.is_grad_enabled())

    def run(zero: torch.Tensor, *given: Any) -> Any:
        own = dict(zip(weights, given, strict=False))
        inputs = given[len(own) :]
        outputs = functional_call(block, own, inputs) if own else block(*inputs)
        return tree_map_only(torch.Tensor, lambda t: t + zero.to(t.dtype), outputs)

    # The checkpoint changes its inputs in place in the backward pass.
    copies = [weight.clone() for weight in weights.values()]
    return checkpoint(run, zero, *copies, *arguments, use_reentrant=True)


def _with_gathered_weights(
    module: torch.nn.Module, forward: Any, mesh: Mesh, *arguments: Any, **options: Any
) -> Any:
    """Outputs of a module's own forward, with its own weights gathered."""
    sharded = dict(module._parameters)
    gathered = {name: mesh.gathered(one) for name, one in sharded.items() if one is not None}
    module._parameters.update(gathered)
    try:
        return forward(*arguments, **options)
    finally:
        module._parameters.update(sharded)
