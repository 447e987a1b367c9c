"""Tokenize captions with the tokenizers of transformers, for every runtime.

CLIP reads a long caption in chunks, as kohya's sd-scripts encode it (`max_token_length`): the
caption's tokens are cut after each 75, whatever the words, and each chunk is a caption of its own,
with marks at both ends and padding. Of the chunks' states, the first mark of the first chunk and
the last of the last one are kept; pooled embeddings are those of the first chunk.

Weights in parentheses multiply the states of their tokens, as sd-scripts' `weighted_captions`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import transformers
from numpy.typing import NDArray

from configs.errors import Refused
from runtimes.families import TextEncoder
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
        base: the pipeline.
        encoder: reads the tokens.
        tokenizer: a tokenizer of transformers.
    """

    def __init__(self, base: Base, encoder: TextEncoder, tokenizer: Any) -> None:
        self.encoder = encoder
        #: Tokens of a caption that the encoder reads, special ones included.
        self.length = base.caption_limits[encoder.component]
        is_clip = encoder.kind == "clip"
        self._chunks = base.chunks if is_clip else 1
        self._is_usual = not (is_clip and base.reads_unusually)
        self.reads_weights = is_clip and base.emphasis == "weights"
        self._family = base.family
        self._tokenizer = tokenizer
        # Padding and truncation are state of a fast tokenizer.
        self._tokenizing = threading.Lock()

    def ids(self, captions: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Token ids and mask (1: no padding) of K captions, each [K, T] int64, padded or cut.

        T is `length`, or of a CLIP encoder, the tokens of all chunks with their own marks.
        """
        if not self._is_usual:
            ids = self._chunked(captions)
            return ids, np.ones_like(ids)  # CLIP reads no mask
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
        if self.reads_weights:
            return [len(tokens) + 2 for tokens in self._weighted_tokens(captions)]
        with self._tokenizing:
            token_ids = self._tokenizer(self._texts(captions), verbose=False).input_ids
        return [len(ids) - self.encoder.prefix for ids in token_ids]

    def weights(self, captions: Sequence[str]) -> NDArray[np.float32]:
        """Factor of each state of K captions, [K, length] f32."""
        factors = np.ones((len(captions), self.length), np.float32)
        for row, tokens in zip(factors, self._weighted_tokens(captions), strict=True):
            kept = [weight for _, weight in tokens][: self.length - 2]
            row[1 : 1 + len(kept)] = kept
        return factors

    def _chunked(self, captions: Sequence[str]) -> NDArray[np.int64]:
        tokenizer = self._tokenizer
        size = (self.length - 2) // self._chunks
        chunks = np.full((len(captions), self._chunks, size + 2), tokenizer.pad_token_id, np.int64)
        chunks[:, :, 0] = tokenizer.bos_token_id
        for of_caption, tokens in zip(chunks, self._weighted_tokens(captions), strict=True):
            ids = [token for token, _ in tokens]
            for number, chunk in enumerate(of_caption):
                part = ids[number * size : (number + 1) * size]
                chunk[1 : 1 + len(part)] = part
                chunk[1 + len(part)] = tokenizer.eos_token_id
        return chunks.reshape(len(captions), -1)

    def _weighted_tokens(self, captions: Sequence[str]) -> list[list[tuple[int, float]]]:
        """The (token, weight) of each caption, uncut and without special tokens."""
        if self.reads_weights:
            parsed = [weighted_parts(caption) for caption in captions]
        else:
            parsed = [[(caption, 1.0)] for caption in captions]
        texts = [text for parts in parsed for text, _ in parts]
        with self._tokenizing:
            encoded = self._tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
        ids = iter(encoded)
        return [[(token, weight) for _, weight in parts for token in next(ids)] for parts in parsed]

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
    return [
        TextTokenizer(base, encoder, load_tokenizer(base, encoder))
        for encoder in base.family.text_encoders
        if encoder.component in base.caption_limits
    ]


#: An escaped mark, the end of a weight, a mark, or text without marks.
_MARKS = re.compile(
    r"\\[()\[\]\\]?|:(?P<weight>[+-]?(?:\d+\.?\d*|\.\d+))\)|[()\[\]:]|[^\\()\[\]:]+"
)
_FACTORS = {"(": 1.1, "[": 1 / 1.1}


def weighted_parts(prompt: str) -> list[tuple[str, float]]:
    r"""The parts of a prompt with their weights, by the web UIs' rule.

    `(a)` has weight 1.1, `[a]` its inverse, `(a:1.3)` 1.3; nested ones multiply. A backslash
    makes a bracket text. A bracket that is not closed reaches to the end.
    """
    parts: list[tuple[str, float]] = []
    opened: dict[str, list[int]] = {"(": [], "[": []}

    def multiply(bracket: str, factor: float) -> None:
        start = opened[bracket].pop()
        parts[start:] = [(text, weight * factor) for text, weight in parts[start:]]

    for match in _MARKS.finditer(prompt):
        mark = match[0]
        if mark in opened:
            opened[mark].append(len(parts))
        elif match["weight"] and opened["("]:
            multiply("(", float(match["weight"]))
        elif mark == ")" and opened["("]:
            multiply("(", _FACTORS["("])
        elif mark == "]" and opened["["]:
            multiply("[", _FACTORS["["])
        else:
            parts.append((mark.removeprefix("\\"), 1.0))
    for bracket, starts in opened.items():
        while starts:
            multiply(bracket, _FACTORS[bracket])
    same = groupby(parts, key=itemgetter(1))  # words are tokenized across parts of one weight
    joined = [("".join(text for text, _ in group), weight) for weight, group in same]
    return joined or [("", 1.0)]  # a tokenizer takes no empty list


def weigh_states(
    states: NDArray[np.float32],
    captions: Sequence[str],
    tokenizers: Sequence[TextTokenizer],
    widths: Sequence[int],
) -> NDArray[np.float32]:
    """The states [K, T, D] of CLIP's tokens, multiplied by the captions' weights if they are read.

    Means are not restored: sd-scripts trains without, and web UIs advise against it for SDXL.

    Args:
        tokenizers: of the encoders whose states are concatenated along D.
        widths: of these encoders' states; their sum is D.
    """
    if not any(tokenizer.reads_weights for tokenizer in tokenizers):
        return states
    weights = [tokenizer.weights(captions)[..., None] for tokenizer in tokenizers]
    pairs = zip(weights, widths, strict=True)
    return states * np.concatenate([np.repeat(w, width, axis=-1) for w, width in pairs], axis=-1)
