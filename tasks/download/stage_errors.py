"""Errors of the download stage."""

from __future__ import annotations

from configs.secrets import without_secrets
from tasks.build_or_reuse import TransientError


class SourceError(ValueError):
    """The source does not match the recipe; the message states what to change.

    The message is one line, without the secrets of URLs.
    """

    def __init__(self, message: str) -> None:
        super().__init__(without_secrets(" ".join(message.split())))


class SourceAway(TransientError):
    """The store or the web server of a source does not answer now: retry.

    The message is one line, without the secrets of URLs.
    """

    def __init__(self, message: str) -> None:
        super().__init__(without_secrets(" ".join(message.split())))


class TooManyFailed(RuntimeError):
    """More rows failed permanently than the recipe allows; the message lists the reasons."""


class Outage(TransientError):
    """Most rows of several shards in a row failed for transient reasons: another run may succeed.

    The message is one line.
    """
