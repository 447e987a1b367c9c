"""Text encoding in a step: token ids to the embeddings of each family's pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from runtimes.families import Family

Encoded = tuple[torch.Tensor | None, torch.Tensor | None]
#: Every attention kernel of PyTorch, which then chooses one; those of NPU and HPU are OVERRIDEABLE.
KERNELS = list(SDPBackend.__members__.values())


def encode_ids(family: Family, models: Sequence[Any], ids: torch.Tensor) -> Encoded:
    """Encode token ids with CLIP text encoders.

    Args:
        family: selects the hidden layer, and the encoders that have pooled embeddings.
        models: n CLIP encoders.
        ids: [B, n, T], one row of tokens per encoder.

    Returns:
        Hidden states [B, T, D] and pooled embeddings [B, P], both concatenated over encoders along
        the last dimension as in the diffusers pipeline's `encode_prompt`; None where the family
        has none.
    """
    states, pooled = [], []
    penultimate = family.clip_states == "penultimate"
    names = family.pooled_outputs([hasattr(model, "text_projection") for model in models])
    for row, (encoder, model, name) in enumerate(zip(family.clip, models, names, strict=True)):
        output = model(ids[:, row].long(), output_hidden_states=penultimate)
        if encoder.states:
            states.append(output.hidden_states[-2] if penultimate else output.last_hidden_state)
        if name is not None:
            pooled.append(getattr(output, name))
    return _concatenate(states), _concatenate(pooled)


def join_t5(states: torch.Tensor | None, t5_states: torch.Tensor) -> torch.Tensor:
    """Concatenate CLIP's states [B, T, D] and T5's [B, T5, D'] along the sequence dimension.

    CLIP's states are padded to D' with zeros, as in StableDiffusion3Pipeline.encode_prompt.
    """
    if states is None:
        return t5_states
    padded = torch.nn.functional.pad(states, (0, t5_states.shape[-1] - states.shape[-1]))
    return torch.cat([padded, t5_states], dim=1)


class FrozenTextEncoders(torch.nn.ModuleList):
    """A base's CLIP encoders, for latents that store token ids; they stay in evaluation mode."""

    def train(self, mode: bool = True) -> FrozenTextEncoders:
        return super().train(False)

    @torch.no_grad()
    def encode(self, family: Family, dtype: torch.dtype, ids: torch.Tensor) -> Encoded:
        """As `encode_ids`, with the bits that a latent shard would store: rounded to bfloat16.

        Args:
            family: of the pipeline.
            dtype: of the embeddings.
            ids: [B, n, T].
        """
        # The encode stage has no autocast, and chooses no kernel: `train.attention` may name one
        # that float32 encoders lack.
        with _without_autocast(ids.device.type), sdpa_kernel(KERNELS):
            states, pooled = encode_ids(family, self, ids)
        return _as_stored(states, dtype), _as_stored(pooled, dtype)


def encode_in_step(
    encode: Callable[[torch.Tensor], Encoded], conditioning: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Replace the `input_ids` of a batch's conditioning by embeddings.

    Args:
        encode: token ids [B, n, T] to hidden states [B, T, D] and pooled embeddings [B, P].
        conditioning: `input_ids` [B, n, T], `dropped` [B] (1 replaces the embeddings by zeros) and,
            with a frozen T5, `t5_prompt_embeds` [B, T5, D]; other keys are passed through.

    Returns:
        `prompt_embeds` [B, T, D] and, where the family has them, `pooled_prompt_embeds` [B, P].
    """
    given = dict(conditioning)
    ids, dropped = given.pop("input_ids"), given.pop("dropped")
    t5_states = given.pop("t5_prompt_embeds", None)
    states, pooled = encode(ids)
    if t5_states is not None:
        states = join_t5(states, t5_states if states is None else t5_states.to(states.dtype))
    assert states is not None, "each family has CLIP's states or a T5"
    kept = (1 - dropped).to(states.dtype)
    given["prompt_embeds"] = states * kept[:, None, None]
    if pooled is not None:
        given["pooled_prompt_embeds"] = pooled * kept[:, None]
    return given


def _as_stored(embeds: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if embeds is None else embeds.to(torch.bfloat16).to(dtype)


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """A context without autocast; `meta` and torchax's devices have none."""
    known = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if known else nullcontext()


def _concatenate(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    if not tensors:
        return None
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=-1)
