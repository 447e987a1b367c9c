"""Captions to token ids by the tokenizers of transformers, whichever runtime encodes them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtimes.contract import WrongInput

#: Tokens that spell any text: CLIP's byte alphabet. Fewer means that a vocabulary was not read.
LEAST_VOCABULARY = 256


def check_vocabulary(name: str, tokenizer: Any, vocabulary: int) -> None:
    """Raise WrongInput for a tokenizer that is not that of a text encoder of so many tokens.

    transformers 5 may read no vocabulary and say nothing; every caption would be the same.
    """
    if not LEAST_VOCABULARY < len(tokenizer) <= vocabulary:
        raise WrongInput(f"{name} has {len(tokenizer)} tokens, its text encoder {vocabulary}")


class Tokens:
    """Tokenizers keep padding and truncation as state, which threads must not share."""

    def __init__(self) -> None:
        self._tokenizing = threading.Lock()

    def ids(
        self, tokenizer: Any, captions: Sequence[str], length: int | None = None
    ) -> NDArray[np.int64]:
        """Token ids [K, T] of captions, padded and truncated to a length, or the tokenizer's."""
        with self._tokenizing:
            found = tokenizer(
                list(captions),
                padding="max_length",
                max_length=length or tokenizer.model_max_length,
                truncation=True,
                return_tensors="np",
            )
        return np.asarray(found.input_ids, np.int64)

    def counts(self, tokenizer: Any, captions: Sequence[str]) -> list[int]:
        """Tokens of each caption before truncation, with marks."""
        with self._tokenizing:
            return [len(ids) for ids in tokenizer(list(captions), verbose=False).input_ids]
