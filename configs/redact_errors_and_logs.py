"""Keep the secrets of URLs out of errors and logs, whichever library wrote them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from configs.redact_urls import without_secrets


def one_line(error: BaseException, length: int = 300) -> str:
    """An error's message without secrets and line breaks; its class if it has no message."""
    # Secrets are removed first: one that is cut off is not recognized.
    return without_secrets(" ".join(str(error).split()))[:length] or type(error).__name__


class Redacted(RuntimeError):
    """An error whose own message cannot be changed; the message has its class."""


@contextmanager
def redacted_errors() -> Iterator[None]:
    """Remove secrets from every error that leaves the block, and from its causes.

    Prefect stores the message of an error that ends a task or a flow.
    """
    try:
        yield
    except BaseException as error:
        if (changed := redacted(error)) is error:
            raise
        raise changed from None


def redacted(error: BaseException, seen: dict[int, BaseException] | None = None) -> BaseException:
    """An error whose message, causes and group have no secrets: itself, or a Redacted."""
    seen = {} if seen is None else seen
    if id(error) not in seen:
        seen[id(error)] = _redact(error)
        silent = error.__suppress_context__
        for name in ("__cause__", "__context__"):
            if (link := getattr(error, name)) is not None:
                setattr(seen[id(error)], name, redacted(link, seen))
        seen[id(error)].__suppress_context__ = silent
        if isinstance(error, BaseExceptionGroup):
            for one in error.exceptions:
                redacted(one, seen)
    return seen[id(error)]


def _redact(error: BaseException) -> BaseException:
    text = without_secrets(str(error))
    error.args = tuple(without_secrets(a) if isinstance(a, str) else a for a in error.args)
    if isinstance(error, OSError):
        for name in ("filename", "filename2", "strerror"):
            if isinstance(value := getattr(error, name), str):
                setattr(error, name, without_secrets(value))
    if str(error) == text:
        return error
    kind = type(error)  # it forms its message itself, from a request for example
    body = {"__module__": kind.__module__, "__str__": lambda self: text}
    try:
        error.__class__ = type(kind.__name__, (kind,), body)
    except TypeError:  # a class of an extension module
        return Redacted(f"{kind.__qualname__}: {text}").with_traceback(error.__traceback__)
    return error


class RedactedRecord(logging.LogRecord):
    """A log record without secrets in its message and its traceback."""

    def getMessage(self) -> str:  # noqa: N802 (the name of logging)
        """See logging.LogRecord."""
        if self.exc_info and not self.exc_text:  # formatters print exc_text if it is there
            self.exc_text = without_secrets(logging.Formatter().formatException(self.exc_info))
        return without_secrets(super().getMessage())


def redact_logs() -> None:
    """Use RedactedRecord for all loggers of this process, those of libraries included."""
    logging.setLogRecordFactory(RedactedRecord)
