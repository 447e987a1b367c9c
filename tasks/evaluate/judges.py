"""Judges of pictures beyond CLIP: what each of them says yes or no to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtimes.contract import WrongInput

#: Pictures [N, H, W, 3] and their prompts in, a yes or no for each picture and verdict out.
Verdicts = dict[str, NDArray[np.bool_]]
Judge = Callable[[NDArray[np.uint8], Sequence[str]], Verdicts]


@dataclass(frozen=True)
class Registered:
    """A judge: the verdicts it gives, and the functions, which are imported only when needed."""

    verdicts: tuple[str, ...]
    judge: Judge
    check: Callable[[Sequence[str]], None]  # ValueError for a prompt that it cannot judge


def _judge_digits(images: NDArray[np.uint8], prompts: Sequence[str]) -> Verdicts:
    from demo.judges import judge

    return judge(images, prompts)


def _check_digits(prompts: Sequence[str]) -> None:
    from demo.world import parse

    for prompt in prompts:
        parse(prompt)


JUDGES = {"digits": Registered(("digit", "style"), _judge_digits, _check_digits)}


def check_prompts(names: Sequence[str], prompts: Sequence[str]) -> None:
    """Raise WrongInput for the first prompt that one of the judges cannot judge."""
    for name in names:
        try:
            JUDGES[name].check(prompts)
        except ValueError as error:
            raise WrongInput(f"evaluate.judges: {name}: {error}") from None


def ask(names: Sequence[str], images: NDArray[np.uint8], prompts: Sequence[str]) -> Verdicts:
    """Every judge's verdicts. Raises WrongInput for pictures that a judge cannot take."""
    found: Verdicts = {}
    for name in names:
        try:
            found |= JUDGES[name].judge(images, prompts)
        except ValueError as error:
            raise WrongInput(f"evaluate.judges: {name}: {error}") from None
    return found
