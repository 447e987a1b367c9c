"""Clean captions and name what is bad about them.

A captioner's text is untrusted: it may repeat what a picture says, or break off in a character.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from configs.settings.caption import CaptionChecks

#: Maximum characters of a caption that are stored.
LONGEST = 10_000
#: Characters that reverse the direction of text around them, which would disguise other text.
BIDI = re.compile("[\u202a-\u202e\u2066-\u2069]")
#: General categories of characters that are none: control, surrogate, private use, unassigned.
NO_TEXT = {"Cc", "Cs", "Co", "Cn"}
#: Length of the sequences of `repetition`, in characters.
SEQUENCE = 12
#: Fraction of a caption's letters that may be of other scripts, as of names.
FOREIGN = 0.1
#: Reasons that depend on no setting of `caption.checks`.
UNREADABLE = "picture not readable"
NO_ANSWER = "no answer"
CUT_OFF = "cut off"


def clean(text: str) -> str:
    """The text in one line, without control characters, at most LONGEST characters."""
    line = BIDI.sub("", " ".join(text.split()))
    return "".join(c for c in line if unicodedata.category(c) not in NO_TEXT)[:LONGEST].strip()


def fault_of(text: str, checks: CaptionChecks, likeness: float | None = None) -> str | None:
    """The reason why a clean caption is bad, or None.

    Args:
        likeness: 100 times the cosine of the CLIP embeddings of caption and picture; None: not
            measured.
    """
    if not text:
        return "empty"
    if _refuses(text, checks.refusals):
        return "refusal"
    if len(text) > checks.max_characters:
        return "too long"
    if repetition(text) > checks.max_repetition:
        return "repetition"
    if checks.scripts and _foreign(text, checks.scripts) > FOREIGN:
        return "other script"
    if likeness is not None and checks.min_likeness is not None and likeness < checks.min_likeness:
        return "unlike the picture"
    return None


def repetition(text: str) -> float:
    """Fraction of the sequences of SEQUENCE characters that occur before in the text, 0 to 1."""
    sequences = [text[start : start + SEQUENCE] for start in range(len(text) - SEQUENCE + 1)]
    return 1 - len(set(sequences)) / len(sequences) if sequences else 0.0


def _refuses(text: str, phrases: Iterable[str]) -> bool:
    """Whether a sentence begins with a phrase."""
    plain = text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'").casefold()
    words = "|".join(re.escape(phrase.casefold()) for phrase in phrases)
    return bool(words and re.search(rf"(?:^|[.!?]\s+)(?:{words})", plain))


def _foreign(text: str, scripts: Iterable[str]) -> float:
    """Fraction of the letters that are of none of the scripts."""
    letters = [c for c in text if c.isalpha()]
    known = tuple(f"{script.upper()} " for script in scripts)
    foreign = sum(not unicodedata.name(c, "").startswith(known) for c in letters)
    return foreign / len(letters) if letters else 0.0
