"""The hint of an error about an unknown name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable

#: Most names that a hint suggests.
SUGGESTED = 3
#: From this similarity on, a name is another one with a typing error.
TYPO = 0.85


def hint_of(name: str, known: Collection[str], prefix: str = "") -> str:
    """`did you mean ...?` with the most similar known names, or `there are: ...` with all.

    Args:
        prefix: of a similar name, such as the section of a setting.
    """
    near = (
        difflib.get_close_matches(name, known, n=1, cutoff=TYPO)
        or longer_names(name, known)
        or _misspelt_names(name, known)
    )
    return did_you_mean(f"{prefix}{one}" for one in near) or f"there are: {', '.join(known)}"


def longer_names(name: str, known: Collection[str]) -> list[str]:
    """Names with all words of this one, such as num_inference_steps for steps; few, or none."""
    words = _words(name)
    found = [one for one in known if words <= _words(one)]
    return found if len(found) <= SUGGESTED else []


def _misspelt_names(name: str, known: Collection[str]) -> list[str]:
    """The most similar name, or those with the most similar word, such as `steps` for `stepz`."""
    words = {word for one in known for word in _words(one)}
    near = difflib.get_close_matches(name, words.union(known), n=1)
    return [one for one in near if one in known] or [
        one for word in near for one in longer_names(word, known)
    ]


def did_you_mean(names: Iterable[str]) -> str:
    """`did you mean a or b?`; empty without a name."""
    found = " or ".join(names)
    return f"did you mean {found}?" if found else ""


def _words(name: str) -> set[str]:
    return set(re.split(r"[_/.-]", name.lower()))
