"""Text encoding in a step, as in torch_models/encode_token_ids.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

from runtimes.families import Family


def pooled_outputs(family: Family, models: Sequence[Any]) -> tuple[str | None, ...]:
    """Family.pooled_outputs of CLIP encoders; empty without them."""
    projecting = [hasattr(model, "text_projection") for model in models]
    return family.pooled_outputs(projecting) if projecting else ()


def encode_ids(
    penultimate: bool, models: Sequence[Any], pooling: Sequence[str | None], ids: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Hidden states [B, T, D] and pooled embeddings [B, P] or None of token ids.

    Args:
        penultimate: True returns the hidden states before the last layer of all encoders, and the
            pooled embeddings of one (SDXL). False returns the states after the final norm of the
            only encoder (Stable Diffusion 1 and 2).
        models: n CLIP encoders.
        pooling: `pooled_outputs` of them.
        ids: [B, n, T], one row of tokens per encoder.
    """
    if not penultimate:
        return models[0](ids[:, 0], return_dict=False)[0], None
    states, pooled = [], None
    for row, model in enumerate(models):
        output = model(ids[:, row], output_hidden_states=True, return_dict=False)
        states.append(output[-1][-2])
        if pooling[row] is not None:
            pooled = output[0]
    return ops.concat(states, -1), pooled


def as_stored(embeds: Tensor, dtype: ms.Type) -> Tensor:
    """Embeddings of frozen encoders, without gradient, with the bits that a shard would store."""
    return ops.stop_gradient(embeds).astype(ms.bfloat16).astype(dtype)
