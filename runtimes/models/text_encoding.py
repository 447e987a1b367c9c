"""From token ids to text conditioning, as each family's pipeline does it; gradients flow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from runtimes.families import Family


def encode_ids(
    family: Family, models: Sequence[Any], ids: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What CLIP text encoders give for token ids [B, n, T], one of n rows for each of `models`.

    Returns:
        Hidden states [B, T, D], those of all encoders side by side, and pooled embeddings [B, P],
        as `encode_prompt` of the family's diffusers pipeline; None where the family has none.
    """
    states, pooled = [], []
    penultimate = family.clip_states == "penultimate"
    for row, (encoder, model) in enumerate(zip(family.clip, models, strict=True)):
        output = model(ids[:, row].long(), output_hidden_states=penultimate)
        if encoder.states:
            states.append(output.hidden_states[-2] if penultimate else output.last_hidden_state)
        if encoder.pooled is not None:
            pooled.append(getattr(output, encoder.pooled))
    return _side_by_side(states), _side_by_side(pooled)


def join_t5(states: torch.Tensor | None, t5_states: torch.Tensor) -> torch.Tensor:
    """Prompt embeddings of CLIP's states [B, T, D], if any, and T5's below them [B, T5, D'].

    CLIP's are widened with zeros, as in StableDiffusion3Pipeline.encode_prompt.
    """
    if states is None:
        return t5_states
    widened = torch.nn.functional.pad(states, (0, t5_states.shape[-1] - states.shape[-1]))
    return torch.cat([widened, t5_states], dim=1)


def encode_in_step(
    family: Family, models: Sequence[Any], conditioning: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """A batch's conditioning with its `input_ids` encoded by `models`, for Family.arguments.

    Takes `input_ids` [B, n, T], `dropped` [B] (1 where the embeddings are to be zeros) and, of a
    T5, which is not trained, `t5_prompt_embeds` [B, T5, D]. Gives `prompt_embeds` and, where the
    family has them, `pooled_prompt_embeds` in their place.
    """
    given = dict(conditioning)
    ids, dropped = given.pop("input_ids"), given.pop("dropped")
    t5_states = given.pop("t5_prompt_embeds", None)
    states, pooled = encode_ids(family, models, ids)
    if t5_states is not None:
        states = join_t5(states, t5_states if states is None else t5_states.to(states.dtype))
    assert states is not None, "each family has CLIP's states or a T5"
    kept = (1 - dropped).to(states.dtype)
    given["prompt_embeds"] = states * kept[:, None, None]
    if pooled is not None:
        given["pooled_prompt_embeds"] = pooled * kept[:, None]
    return given


def _side_by_side(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    if not tensors:
        return None
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=-1)
