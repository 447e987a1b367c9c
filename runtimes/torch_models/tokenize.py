"""Tokenize captions with the tokenizers of transformers, for every runtime."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import transformers
from numpy.typing import NDArray

from configs.errors import Refused
from runtimes.families import Family, TextEncoder
from runtimes.pipeline_folder.folder import Base

#: Classes of transformers that read the tokenizers of the published pipelines.
TOKENIZERS = {
    "clip": transformers.CLIPTokenizer,
    "t5": transformers.T5TokenizerFast,
    "llm": transformers.Qwen2Tokenizer,
}
#: Size of CLIP's byte alphabet. A tokenizer with no more tokens has loaded without its vocabulary.
MIN_VOCABULARY = 256


def check_vocabulary(name: str, tokenizer: Any, vocabulary: int) -> None:
    """Raise Refused if a tokenizer's vocabulary does not match its text encoder.

    transformers 5 can load a tokenizer without a vocabulary and without an error. All captions
    would then have the same token ids.

    Args:
        name: name of the tokenizer, for the message.
        tokenizer: a tokenizer of transformers.
        vocabulary: `vocab_size` of the text encoder's config.
    """
    if not MIN_VOCABULARY < len(tokenizer) <= vocabulary:
        raise Refused(f"{name} has {len(tokenizer)} tokens, its text encoder {vocabulary}")


class TextTokenizer:
    """Tokenizes captions for one text encoder of a pipeline.

    Args:
        family: family of the pipeline.
        encoder: reads the tokens.
        tokenizer: a tokenizer of transformers.
        length: tokens of a caption that the encoder reads, special ones included.
    """

    def __init__(self, family: Family, encoder: TextEncoder, tokenizer: Any, length: int) -> None:
        self.encoder = encoder
        self.length = length
        self._family = family
        self._tokenizer = tokenizer
        # Padding and truncation are state of a fast tokenizer.
        self._tokenizing = threading.Lock()

    def ids(self, captions: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Token ids and mask (1: no padding) of K captions, each [K, T] int64, padded or cut."""
        with self._tokenizing:
            encoded = self._tokenizer(
                self._texts(captions),
                padding="max_length",
                max_length=self.length + self.encoder.prefix,
                truncation=True,
                return_tensors="np",
            )
        return np.asarray(encoded.input_ids, np.int64), np.asarray(encoded.attention_mask, np.int64)

    def counts(self, captions: Sequence[str]) -> list[int]:
        """Number of tokens of each caption before it is cut, special ones included."""
        with self._tokenizing:
            token_ids = self._tokenizer(self._texts(captions), verbose=False).input_ids
        return [len(ids) - self.encoder.prefix for ids in token_ids]

    def _texts(self, captions: Sequence[str]) -> list[str]:
        if self.encoder.kind == "clip":
            return list(captions)
        return [self._family.chat(self._tokenizer, caption) for caption in captions]


def load_tokenizer(base: Base, encoder: TextEncoder) -> Any:
    """The tokenizer of a pipeline's text encoder. Raises OSError or ValueError."""
    kind = TOKENIZERS[encoder.kind]
    return kind.from_pretrained(base.part(encoder.tokenizer), local_files_only=True)


def text_tokenizers(base: Base) -> list[TextTokenizer]:
    """The tokenizers of all text encoders of a pipeline, in the order of its caption limits."""
    limits = base.caption_limits
    return [
        TextTokenizer(base.family, encoder, load_tokenizer(base, encoder), limits[name])
        for encoder in base.family.text_encoders
        if (name := encoder.component) in limits
    ]
