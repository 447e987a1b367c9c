"""What can go wrong in a download, by what its reader has to do."""

from __future__ import annotations


class SourceError(ValueError):
    """The source cannot be used as the recipe says; the message says what to change."""


class TooManyFailed(RuntimeError):
    """More rows failed for good than the recipe allows; the message lists why."""
