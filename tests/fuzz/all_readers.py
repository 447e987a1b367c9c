"""Every reader of what others wrote."""

from __future__ import annotations

from pathlib import Path

from fuzz import lists, models, pictures, recipes, records, tars, tensors
from fuzz.reader import Reader

GROUPS = (recipes, records, tensors, tars, lists, models, pictures)


def all_readers(folder: Path) -> list[Reader]:
    """The readers, each group with valid inputs of its own below `folder`."""
    found = []
    for group in GROUPS:
        own = folder / group.__name__.rpartition(".")[2].rpartition(".")[2]
        own.mkdir()
        found += group.readers(own)
    return found
