"""What both kinds of captioner have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from PIL import Image


@dataclass(frozen=True)
class Decoding:
    """How a captioner chooses tokens."""

    max_new_tokens: int
    temperature: float  # 0: greedy
    seed: int


@dataclass(frozen=True)
class Answer:
    """What a captioner says of a picture; its text is not clean yet."""

    text: str
    is_cut: bool  # at max_new_tokens


@dataclass(frozen=True)
class Question:
    """A picture without captions of some prompts."""

    row: int  # in the image shard
    picture: Image.Image  # RGB
    prompts: tuple[str, ...]  # names


#: Receives a question's row, a prompt's name and the answer; None: there is none to be had.
Keep = Callable[[int, str, Answer | None], None]


class Captioner(Protocol):
    """Answers questions; thread-safe."""

    def caption(self, questions: Iterable[Question], keep: Keep) -> None:
        """Call `keep` with the answer of each prompt of each question, in any order."""
        ...
