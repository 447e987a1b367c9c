"""Judges: classifiers that pass or fail each picture on named verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtimes.contract import WrongInput

#: Verdict name -> bool [N], True for each picture that passes.
Verdicts = dict[str, NDArray[np.bool_]]
#: A function of pictures u8 [N, H, W, 3] and their N prompts.
Judge = Callable[[NDArray[np.uint8], Sequence[str]], Verdicts]


@dataclass(frozen=True)
class JudgeEntry:
    """A registered judge. Its functions import their modules when they are called."""

    verdicts: tuple[str, ...]  # names of the verdicts
    judge: Judge
    check: Callable[[Sequence[str]], None]  # raises ValueError for an unsupported prompt


def _judge_digits(images: NDArray[np.uint8], prompts: Sequence[str]) -> Verdicts:
    from demo.judges import judge

    return judge(images, prompts)


def _check_digits(prompts: Sequence[str]) -> None:
    from demo.digits import parse

    for prompt in prompts:
        parse(prompt)


JUDGES = {"digits": JudgeEntry(("digit", "style"), _judge_digits, _check_digits)}


def check_prompts(names: Sequence[str], prompts: Sequence[str]) -> None:
    """Raise WrongInput for the first prompt that a judge does not support."""
    for name in names:
        try:
            JUDGES[name].check(prompts)
        except ValueError as error:
            raise WrongInput(f"evaluate.judges: {name}: {error}") from None


def judge_pictures(
    names: Sequence[str], images: NDArray[np.uint8], prompts: Sequence[str]
) -> Verdicts:
    """The verdicts of all named judges on pictures u8 [N, H, W, 3].

    Raises:
        WrongInput: a judge does not support these pictures.
    """
    found: Verdicts = {}
    for name in names:
        try:
            found |= JUDGES[name].judge(images, prompts)
        except ValueError as error:
            raise WrongInput(f"evaluate.judges: {name}: {error}") from None
    return found
