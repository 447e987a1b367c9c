"""From token ids to text conditioning, as each family's pipeline does it; gradients flow.

What is computed here, and why, is told in runtimes/models/text_encoding.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import Tensor, ops


def encode_ids(family: str, models: Sequence[Any], ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """Hidden states [B, T, D] and pooled embeddings [B, P] or None, of token ids [B, n, T]."""
    if family == "sd":
        return models[0](ids[:, 0], return_dict=False)[0], None
    states, pooled = [], None
    for row, model in enumerate(models):
        output = model(ids[:, row], output_hidden_states=True, return_dict=False)
        states.append(output[-1][-2])
        pooled = output[0]
    return ops.concat(states, -1), pooled


def never_used(family: str, part: str, layers: int) -> tuple[str, ...]:
    """Beginnings of the names of a text encoder's weights that no gradient reaches.

    SDXL takes the hidden states before the last layer, and pools by its second encoder alone.
    """
    if family != "sdxl" or part != "text_encoder":
        return ()
    last = f"text_model.encoder.layers.{layers - 1}."
    return (last, "text_model.final_layer_norm.", "text_projection.")
