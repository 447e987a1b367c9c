"""From token ids to text conditioning, as each family's pipeline does it; gradients flow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def encode_ids(
    family: str, models: Sequence[Any], ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What CLIP text encoders give for token ids [B, n, T], one of n rows for each of `models`.

    Returns:
        Hidden states [B, T, D], those of all encoders side by side, and pooled embeddings [B, P]
        or None. As `encode_prompt` of diffusers' pipelines: SD 1 and 2 take the last hidden states
        after the final norm and pool nothing; SDXL takes the penultimate ones (arXiv 2307.01952,
        section 2.1) and pools by its second encoder; SD3 pools by both (arXiv 2403.03206, section
        4.2), and T5's states then come below these (see `join_t5`).
    """
    if family == "sd":
        return models[0](ids[:, 0].long(), attention_mask=None)[0], None
    outputs = [
        model(ids[:, row].long(), output_hidden_states=True) for row, model in enumerate(models)
    ]
    states = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
    if family == "sdxl":
        return states, outputs[-1][0]
    return states, torch.cat([output[0] for output in outputs], dim=-1)


def join_t5(states: torch.Tensor, t5_states: torch.Tensor) -> torch.Tensor:
    """SD3's prompt embeddings [B, T + T5, D]: CLIP's states widened with zeros, T5's [B, T5, D].

    As StableDiffusion3Pipeline.encode_prompt.
    """
    widened = torch.nn.functional.pad(states, (0, t5_states.shape[-1] - states.shape[-1]))
    return torch.cat([widened, t5_states], dim=1)


def encode_in_step(
    family: str, models: Sequence[Any], conditioning: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """A batch's conditioning with its `input_ids` encoded by `models`, for Family.arguments.

    Takes `input_ids` [B, n, T], `dropped` [B] (1 where the embeddings are to be zeros) and, for
    SD3, `t5_prompt_embeds` [B, T5, D], which is not trained; gives `prompt_embeds` and, where the
    family has them, `pooled_prompt_embeds` in their place.
    """
    given = dict(conditioning)
    ids, dropped = given.pop("input_ids"), given.pop("dropped")
    t5_states = given.pop("t5_prompt_embeds", None)
    states, pooled = encode_ids(family, models, ids)
    if t5_states is not None:
        states = join_t5(states, t5_states.to(states.dtype))
    kept = (1 - dropped).to(states.dtype)
    given["prompt_embeds"] = states * kept[:, None, None]
    if pooled is not None:
        given["pooled_prompt_embeds"] = pooled * kept[:, None]
    return given
