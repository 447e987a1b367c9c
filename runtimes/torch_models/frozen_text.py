"""Frozen text encoders: a T5, or a language model (LLM) that reads a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from runtimes.families import Family, TextEncoder
from runtimes.torch_models.tokenize import LockedTokenizers

#: Classes of transformers that read the tokenizers of the published pipelines.
TOKENIZERS = {
    "clip": transformers.CLIPTokenizer,
    "t5": transformers.T5TokenizerFast,
    "llm": transformers.Qwen2Tokenizer,
}


class FrozenText:
    """Tokenizes captions for a family's frozen text encoder.

    Args:
        family: with such an encoder.
        tokenizer: of transformers.
        model: the encoder.
        length: maximum number of tokens of a caption.
        tokenizers: locks the tokenizer.
    """

    def __init__(
        self,
        family: Family,
        tokenizer: Any,
        model: Any,
        length: int,
        tokenizers: LockedTokenizers,
    ) -> None:
        assert family.frozen_text is not None
        self.encoder: TextEncoder = family.frozen_text
        self.model = model
        self._family, self._tokenizer, self._tokens = family, tokenizer, tokenizers
        self._length = length + self.encoder.prefix

    def ids(self, captions: Sequence[str]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Token ids and mask (1: no padding) of K captions, each [K, T] int64."""
        texts = [self._family.chat(self._tokenizer, caption) for caption in captions]
        return self._tokens.ids_and_mask(self._tokenizer, texts, self._length)

    def counts(self, captions: Sequence[str]) -> list[int]:
        """Number of tokens of each caption before truncation, those of the template included."""
        texts = [self._family.chat(self._tokenizer, caption) for caption in captions]
        found = self._tokens.counts(self._tokenizer, texts)
        return [count - self.encoder.prefix for count in found]

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
