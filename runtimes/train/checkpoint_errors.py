"""Errors of checkpoints, and the difference between damage and a store that does not respond."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Self, TypeVar

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from artifacts.remote_stores import is_forbidden, is_of_client, is_outage

#: Seconds before each further attempt, besides the attempts of a store's own client.
RETRY_SECONDS = (10, 60, 300)
log = logging.getLogger("kiln")
T = TypeVar("T")


class CheckpointError(OSError):
    """An error with a message for the user; `errno` is that of the failed operation, if known.

    Attributes:
        away: a remote store did not respond, which may pass.
    """

    away = False

    @classmethod
    def make(cls, number: int | None, message: str, *, away: bool) -> Self:
        """An error with all its facts; OSError's own arguments have none for `away`."""
        error = cls(number, message)
        error.away = away
        return error

    @classmethod
    def of(cls, fs: AbstractFileSystem, error: Exception, message: str) -> Self:
        """The error for the user, of an operation's error."""
        return cls.make(getattr(error, "errno", None), message, away=is_away(fs, error))

    def __str__(self) -> str:
        return str(self.strerror)


class CheckpointNotWritten(CheckpointError):
    """A checkpoint could not be written; older checkpoints are intact."""


class CheckpointsUnreachable(CheckpointError):
    """A remote store did not respond; its checkpoints may be intact."""


def is_away(fs: AbstractFileSystem, error: Exception) -> bool:
    """Whether a remote store failed in a way that may pass."""
    if isinstance(error, CheckpointError):  # of another rank, which has decided it
        return error.away
    return not isinstance(fs, LocalFileSystem) and is_outage(error)


def reason_of(error: Exception) -> str:
    """The message of an error for the user."""
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"


def is_unreachable(fs: AbstractFileSystem, error: Exception) -> bool:
    """Whether a remote store failed to respond: the checkpoint itself may be intact."""
    if isinstance(fs, LocalFileSystem) or isinstance(error, FileNotFoundError):
        return False
    return isinstance(error, OSError) or is_of_client(error)


def with_retries(fs: AbstractFileSystem, work: Callable[[], T], failure: str) -> T:
    """The result of `work`; a remote store that does not respond is tried again.

    Args:
        failure: what could not be done, for the log.
    """
    for seconds in RETRY_SECONDS:
        try:
            return work()
        except Exception as error:  # clients of remote stores define their own exception types
            if is_forbidden(error) or not is_unreachable(fs, error):
                raise
            words = "%s: %s; next attempt in %d seconds"
            log.warning(words, failure, reason_of(error), seconds)
            time.sleep(seconds)
    return work()
