"""Errors of the download stage."""

from __future__ import annotations


class SourceError(ValueError):
    """The source does not match the recipe; the message states what to change."""


class TooManyFailed(RuntimeError):
    """More rows failed permanently than the recipe allows; the message lists the reasons."""
