"""Recompute activations in the backward pass, by PyTorch's own checkpoints around each block."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_aten = torch.ops.aten


#: Operations whose outputs selective recomputation keeps. Products of batches (bmm) are attention's
#: logits, which are larger than all else.
KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def recompute(part: Any, what: str) -> None:
    """Enable gradient checkpointing of a component's blocks.

    Args:
        part: a model of diffusers or transformers.
        what: `train.gradient_checkpointing`, blocks or selective.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if what == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    if hasattr(part, "enable_gradient_checkpointing"):  # diffusers
        part.enable_gradient_checkpointing(partial(checkpoint, **options))
    elif hasattr(part, "activation_checkpointing_enable"):  # transformers
        part.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:  # before transformers renamed it
        part.gradient_checkpointing_enable(options)


def without_recomputation(part: Any) -> None:
    """Disable gradient checkpointing of a component, if it is enabled."""
    if hasattr(part, "disable_gradient_checkpointing"):  # diffusers
        if part.is_gradient_checkpointing:
            part.disable_gradient_checkpointing()
    elif hasattr(part, "activation_checkpointing_disable"):  # transformers
        if part.is_activation_checkpointing:
            part.activation_checkpointing_disable()
    elif getattr(part, "is_gradient_checkpointing", False):
        part.gradient_checkpointing_disable()


def _policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    kept = operation in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
