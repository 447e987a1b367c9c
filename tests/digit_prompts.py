"""Captions and prompts of the demo's digits, and the verdicts of its judges."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from demo import captions
from demo.captions import STYLES, style_index
from demo.digit_judges import judge_digit, judge_style

#: Captions without a paper, or without any style, which the shipped text encoders know too.
SHORT = (
    *("a handwritten {word} in {ink}", "the number {number} in {ink}"),
    *("a handwritten {word}", "the digit {number}"),
)


def all_captions() -> list[str]:
    """Every caption of the pictures, and every short one, sorted."""
    texts = set()
    for digit, word in enumerate(captions.WORDS):
        for index, style in enumerate(STYLES):
            texts.update(captions.captions(digit, index))
            texts.update(t.format(word=word, number=digit, ink=style.ink) for t in SHORT)
    return sorted(texts)


def prompts(styles: tuple[str, ...], count: int) -> list[str]:
    """`count` captions spread evenly over digits, `styles` and templates."""
    chosen = []
    for index in range(count):
        digit, turn = index % 10, index // 10
        options = captions.captions(digit, style_index(styles[(2 * digit + turn) % len(styles)]))
        chosen.append(options[(digit + turn) % len(options)])
    return chosen


def judge(images: NDArray[np.uint8], prompts: Sequence[str]) -> dict[str, NDArray[np.bool_]]:
    """The verdicts "digit" and "style", bool [N], of pictures [N, 32, 32, 3]."""
    return {"digit": judge_digit(images, prompts), "style": judge_style(images, prompts)}
