"""From token ids to text conditioning, as models/text_encoding.py does it; gradients flow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import Tensor, ops


def encode_ids(
    penultimate: bool, models: Sequence[Any], ids: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Hidden states [B, T, D] and pooled embeddings [B, P] or None, of token ids [B, n, T].

    Args:
        penultimate: the states before the last layer, and pooled ones of the last model (SDXL);
            otherwise those after the final norm of the only model (Stable Diffusion 1 and 2).
    """
    if not penultimate:
        return models[0](ids[:, 0], return_dict=False)[0], None
    states, pooled = [], None
    for row, model in enumerate(models):
        output = model(ids[:, row], output_hidden_states=True, return_dict=False)
        states.append(output[-1][-2])
        pooled = output[0]
    return ops.concat(states, -1), pooled
