"""The styles of the demo's pictures, ink and paper in words and in colours, and their captions.

Captions are written by templates, and parsed.
"""

import re
from dataclasses import dataclass
from functools import cache

import numpy as np

Rgb = tuple[int, int, int]


@dataclass(frozen=True)
class Style:
    """Ink and paper of a picture, as caption phrases and as colours."""

    ink: str
    paper: str
    ink_rgb: Rgb
    paper_rgb: Rgb
    grainy: bool = False

    @property
    def name(self) -> str:
        return f"{self.ink} on {self.paper}"


INKS: dict[str, Rgb] = {
    "black": (25, 25, 30),
    "red": (215, 35, 40),
    "blue": (35, 70, 210),
    "green": (20, 140, 60),
    "purple": (130, 45, 160),
    "orange": (240, 130, 20),
}
PAPERS: dict[str, Rgb] = {
    "white": (250, 250, 248),
    "yellow": (252, 236, 150),
    "pink": (250, 200, 215),
}
CHALK: Rgb = (240, 242, 235)

STYLES: tuple[Style, ...] = (
    *(
        Style(f"{ink} ink", f"{paper} paper", INKS[ink], PAPERS[paper])
        for ink in INKS
        for paper in PAPERS
    ),
    # Gold on navy teaches the base light-on-dark pictures, which LoRA needs.
    Style("white chalk", "a black board", CHALK, (32, 33, 36), grainy=True),
    Style("gold ink", "navy paper", (235, 190, 70), (22, 30, 80)),
    Style("white chalk", "a green board", CHALK, (30, 85, 62), grainy=True),
)
NEW_STYLE = "white chalk on a green board"
# The UNet of the base is trained without chalk. One that knows chalk on a black board combines it
# with "green", and draws the new style in half of all cases.
BASE_STYLES = tuple(style.name for style in STYLES if style.ink != "white chalk")


def style_index(name: str) -> int:
    """The index of a style in STYLES. Raises ValueError for an unknown name."""
    names = [style.name for style in STYLES]
    if name not in names:
        raise ValueError(f"no style is called {name!r}; the styles are: {names}")
    return names.index(name)


WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEMPLATES = (
    "a handwritten {word} in {ink} on {paper}",
    "{word}, {ink} on {paper}",
    "the digit {word} written in {ink} on {paper}",
    "a photo of the number {number} in {ink} on {paper}",
)


#: Of a picture whose reference has the same handwriting; no digit is named.
EDIT_TEMPLATES = (
    "the same digit in {ink} on {paper}",
    "the same digit, {ink} on {paper}",
    "the digit written in {ink} on {paper}",
    "{ink} on {paper}, the same digit",
)


def edit_caption(style: int, rng: np.random.Generator) -> str:
    """The instruction for the style STYLES[style] by one of EDIT_TEMPLATES at random."""
    phrases = {"ink": STYLES[style].ink, "paper": STYLES[style].paper}
    return EDIT_TEMPLATES[int(rng.integers(len(EDIT_TEMPLATES)))].format(**phrases)


def captions(digit: int, style: int) -> list[str]:
    """A caption by each template for a digit in the style STYLES[style]."""
    words = {"word": WORDS[digit], "number": digit}
    phrases = {"ink": STYLES[style].ink, "paper": STYLES[style].paper}
    return [template.format(**words, **phrases) for template in TEMPLATES]


def caption(digit: int, style: int, rng: np.random.Generator) -> str:
    """One of `captions` at random."""
    return captions(digit, style)[int(rng.integers(len(TEMPLATES)))]


@dataclass(frozen=True)
class Asked:
    """The content of a caption; None for an unspecified ink or paper, or the reference's digit."""

    digit: int | None
    ink: str | None = None
    paper: str | None = None

    def styles(self) -> list[int]:
        """The styles that satisfy the caption, as indices into STYLES."""
        return [
            index
            for index, style in enumerate(STYLES)
            if self.ink in (None, style.ink) and self.paper in (None, style.paper)
        ]


def _any_of(phrases: set[str]) -> re.Pattern[str]:
    return re.compile(r"\b(" + "|".join(map(re.escape, sorted(phrases))) + r")\b")


_DIGIT = _any_of(set(WORDS) | set("0123456789"))
_INK = _any_of({style.ink for style in STYLES})
_PAPER = _any_of({style.paper for style in STYLES})


@cache
def parse(text: str, has_reference: bool = False) -> Asked:
    """Parse a caption.

    Args:
        has_reference: whether a caption may leave the digit to its reference.

    Raises:
        ValueError: it has not exactly one digit, or names no known style.
    """
    lowered = text.lower()
    digits, inks, papers = (set(part.findall(lowered)) for part in (_DIGIT, _INK, _PAPER))
    is_left_out = has_reference and not digits
    if (len(digits) != 1 and not is_left_out) or len(inks) > 1 or len(papers) > 1:
        raise ValueError(
            f"caption {text!r} should name one digit, at most one ink and at most one paper, "
            f'as in "{captions(7, style_index(NEW_STYLE))[0]}"'
        )
    asked = Asked(_number(digits), next(iter(inks), None), next(iter(papers), None))
    if not asked.styles():
        raise ValueError(f"caption {text!r} asks for {asked.ink} on {asked.paper}: no such style")
    return asked


def _number(digits: set[str]) -> int | None:
    for word in digits:
        return WORDS.index(word) if word in WORDS else int(word)
    return None
