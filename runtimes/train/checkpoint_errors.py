"""Errors of checkpoints, and the difference between damage and a store that does not respond."""

from __future__ import annotations

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from artifacts.remote_clients import is_of_client


class CheckpointError(OSError):
    """An error with a message for the user; `errno` is that of the failed operation, if known."""

    def __str__(self) -> str:
        return str(self.strerror)


class CheckpointNotWritten(CheckpointError):
    """A checkpoint could not be written; older checkpoints are intact."""


class CheckpointsUnreachable(CheckpointError):
    """A remote store did not respond; its checkpoints may be intact."""


def reason_of(error: Exception) -> str:
    """The message of an error for the user."""
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"


def is_unreachable(fs: AbstractFileSystem, error: Exception) -> bool:
    """Whether a remote store failed to respond: the checkpoint itself may be intact."""
    if isinstance(fs, LocalFileSystem) or isinstance(error, FileNotFoundError):
        return False
    return isinstance(error, OSError) or is_of_client(error)
