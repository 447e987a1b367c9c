"""Frozen text encoders: a T5, or a language model (LLM) that reads a chat template."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from runtimes.families import Family, TextEncoder
from runtimes.torch_models.tokenize import TextTokenizer


class FrozenText(TextTokenizer):
    """A family's frozen text encoder, with its tokenizer.

    Args:
        family: with such an encoder.
        tokenizer: of transformers.
        model: the encoder.
        length: maximum number of tokens of a caption.
    """

    def __init__(self, family: Family, tokenizer: Any, model: Any, length: int) -> None:
        assert family.frozen_text is not None
        super().__init__(family, family.frozen_text, tokenizer, length)
        self.model = model

    def kept(self, mask: NDArray[Any]) -> list[NDArray[Any]] | None:
        """Places of the tokens to store of each caption; None: all, with those of padding."""
        if self.encoder.padded:
            return None
        # Padding is before the tokens where the tokenizer's `padding_side` is left.
        return [np.flatnonzero(row)[self.encoder.prefix :] for row in mask]


def frozen_states(
    encoder: TextEncoder, model: Any, ids: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Hidden states [K, T, D] of token ids and their mask [K, T].

    As in the pipelines, T5 gets no mask: its states of padding depend on the caption.
    """
    if encoder.kind == "t5":
        states: torch.Tensor = model(ids)[0]
        return states
    # The language model's own head would compute logits, which nobody needs.
    output = model.base_model(
        input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False
    )
    layers = [output.hidden_states[index] for index in encoder.layers]
    return torch.cat(layers, dim=-1)
