"""Tokenize captions with the tokenizers of transformers, for every runtime."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtimes.contract import WrongInput

#: Size of CLIP's byte alphabet. A tokenizer with no more tokens has loaded without its vocabulary.
MIN_VOCABULARY = 256


def check_vocabulary(name: str, tokenizer: Any, vocabulary: int) -> None:
    """Raise WrongInput if a tokenizer's vocabulary does not match its text encoder.

    transformers 5 can load a tokenizer without a vocabulary and without an error. All captions
    would then have the same token ids.

    Args:
        name: of the tokenizer, for the message.
        tokenizer: of transformers.
        vocabulary: `vocab_size` of the text encoder's config.
    """
    if not MIN_VOCABULARY < len(tokenizer) <= vocabulary:
        raise WrongInput(f"{name} has {len(tokenizer)} tokens, its text encoder {vocabulary}")


class LockedTokenizers:
    """Calls tokenizers under a lock: padding and truncation are state of a fast tokenizer."""

    def __init__(self) -> None:
        self._tokenizing = threading.Lock()

    def ids(self, tokenizer: Any, captions: Sequence[str]) -> NDArray[np.int64]:
        """Token ids [K, T] int64 of K captions, padded or cut to the tokenizer's length."""
        return self.ids_and_mask(tokenizer, captions, tokenizer.model_max_length)[0]

    def ids_and_mask(
        self, tokenizer: Any, captions: Sequence[str], length: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As `ids`, of `length` tokens, with the mask [K, T] int64 (1: no padding)."""
        with self._tokenizing:
            found = tokenizer(
                list(captions),
                padding="max_length",
                max_length=length,
                truncation=True,
                return_tensors="np",
            )
        return np.asarray(found.input_ids, np.int64), np.asarray(found.attention_mask, np.int64)

    def counts(self, tokenizer: Any, captions: Sequence[str]) -> list[int]:
        """Number of tokens of each caption before truncation, special tokens included."""
        with self._tokenizing:
            return [len(ids) for ids in tokenizer(list(captions), verbose=False).input_ids]
