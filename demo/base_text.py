"""A real CLIP byte-level BPE tokenizer, learned from the demo's own captions."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTokenizer

START, END = "<|startoftext|>", "<|endoftext|>"
CONTEXT = 77  # tokens, as in every CLIP
Merge = tuple[str, str]


def _joined(symbols: list[str], merge: Merge) -> list[str]:
    """`symbols` with every neighbouring pair `merge` made one."""
    out: list[str] = []
    for symbol in symbols:
        if out and (out[-1], symbol) == merge:
            out[-1] += symbol
        else:
            out.append(symbol)
    return out


def learn_merges(captions: Iterable[str]) -> list[Merge]:
    """Byte-pair merges, the most frequent pair first, until every word is one token."""
    counts = Counter(word for text in captions for word in re.findall(r"[a-z]+|\d|[^\s\w]", text))
    words = {word: [*word[:-1], word[-1] + "</w>"] for word in counts}
    merges: list[Merge] = []
    while True:
        pairs: Counter[Merge] = Counter()
        for word, symbols in words.items():
            for pair in pairwise(symbols):
                pairs[pair] += counts[word]
        if not pairs:
            return merges
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        words = {word: _joined(symbols, best) for word, symbols in words.items()}


def vocabulary(merges: Iterable[Merge]) -> dict[str, int]:
    """CLIP's layout: bytes, bytes that end a word, merges, and the two marks at the end."""
    characters = sorted(ByteLevel.alphabet())
    tokens = characters + [c + "</w>" for c in characters] + ["".join(m) for m in merges]
    return {token: index for index, token in enumerate(dict.fromkeys([*tokens, START, END]))}


def make_tokenizer(merges: list[Merge], pad_token: str = END) -> CLIPTokenizer:
    """The tokenizer of `merges`; SDXL's second one pads with "!"."""
    vocab = vocabulary(merges)
    tokenizer = CLIPTokenizer(
        vocab=vocab, merges=merges, pad_token=pad_token, model_max_length=CONTEXT
    )
    # transformers 5 takes the vocabulary only under these names and ignores any other silently.
    if len(tokenizer) != len(vocab):
        raise RuntimeError(f"the tokenizer took {len(tokenizer)} of {len(vocab)} tokens")
    return tokenizer


def save_tokenizer(tokenizer: CLIPTokenizer, merges: list[Merge], folder: Path) -> None:
    """Write the tokenizer, with the two files that transformers 4 reads it from."""
    tokenizer.save_pretrained(folder)
    (folder / "vocab.json").write_text(
        json.dumps(vocabulary(merges), ensure_ascii=False), encoding="utf-8"
    )
    lines = ["#version: 0.2", *(" ".join(merge) for merge in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
