"""The hint of an error about an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def hint_of(name: str, known: Collection[str], prefix: str = "") -> str:
    """`did you mean ...?` with the most similar known name, or `there are: ...` with all.

    Args:
        prefix: of the similar name, such as the section of a setting.
    """
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {prefix}{near[0]}?" if near else f"there are: {', '.join(known)}"
