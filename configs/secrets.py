"""Secrets of URLs and settings: refuse, remove and hide them.

Credentials in URLs are removed from text, errors and logs, whichever library wrote them. Settings
with credentials in URLs, or with odd names, are refused. Other secrets of settings are hidden from
Prefect, which stores the parameters of runs.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import SecretStr

#: Query parameters whose values are kept: they select a picture or its rendering. All other values
#: are removed, because each service has its own names for signatures and tokens.
HARMLESS = re.compile(
    "auto|crop|dl|download|dpr|ext|file|filename|fit|fm|format|h|height|id|image|image_id|img|lang"
    "|mode|name|page|q|quality|rect|resize|revision|size|split|type|v|ver|version|versionid|w|width",
    re.IGNORECASE,
)
#: user:password@ or token@. A name without a colon is a revision (hf) or a container (Azure).
#: A password of AWS may have slashes; digits before the first slash are a port.
USERINFO = re.compile(
    r"(?<=://)[^\s/?#:@]*:(?:[^\s/?#]*|(?!\d*/)[^\s?#:@]*)@"
    r"|(?<!hf)(?<!abfs)(?<!abfss)(?<!az)(://)[^\s/?#]*@"
)
#: Names of settings with a secret, such as beam.s3_secret_access_key.
SECRET_NAME = re.compile(
    r"[^.]*(secret|passw|passphrase|(api|access|account|private)_?key|connection_string"
    r"|credentials)[^.]*$|(?<!user_agent_)token$",
    re.I,
)
HTTP = re.compile("https?://", re.IGNORECASE)
REMEDY = "set credentials in the environment (AWS_ACCESS_KEY_ID, HF_TOKEN, FSSPEC_...)"
#: The end of a value, which keeps the punctuation of the sentence around it.
END = r"(?=[:,.'\")\]]*(?:[\s&;#]|$))"
#: A value that is already removed.
REMOVED = rf"\.\.\.{END}"
PARAMETER = re.compile(rf"(?<=[?&;#])([^\s?&;#=/]+)=(?!{REMOVED})[^\s&;#]*?{END}")
#: Filesystems of fsspec that read from the next URL of a chain; others would not see it.
CHAINING = {
    *("blockcache", "cached", "dir", "filecache", "libarchive", "reference", "simplecache"),
    *("tar", "zip"),
}
#: The end of a chain: a URL or an absolute path.
CHAINED = re.compile(r"[a-z0-9+]+://|[/.~]")
#: A query that is a value without a name.
UNNAMED = re.compile(rf"(https?://[^\s?#]*\?)(?!{REMOVED})[^\s?&;#=]+?{END}")


def without_secrets(text: str) -> str:
    """A text whose URLs have no user and password, and "..." for values that may be secret.

    Values of HARMLESS parameters are unchanged, and so is other text, unless it looks like a
    parameter (`;name=value`).
    """
    text = UNNAMED.sub(r"\1...", USERINFO.sub(r"\1", text))
    return PARAMETER.sub(_masked, text)


def has_secrets(text: str) -> bool:
    """Whether a text is a URL with a part that `without_secrets` removes."""
    return "://" in text and without_secrets(text) != text


def is_secret(name: str, value: Any) -> bool:
    """Whether the value of a setting that is no section is a secret, by its (dotted) name.

    YAML reads a secret of digits as a number. Null and booleans are none.
    """
    return bool(SECRET_NAME.search(name)) and not isinstance(value, bool | None)


def without_credentials(url: str, *, is_stored: bool) -> str:
    """The URL. Raises ValueError for a user and password, unless http sends them.

    Args:
        is_stored: whether manifests name the URL, which then may have no secret at all.
    """
    if is_stored and has_secrets(url):
        raise ValueError(f"a URL with a secret is refused, since artifacts name it: {REMEDY}")
    if not HTTP.match(url) and USERINFO.search(url):
        raise ValueError(f"a URL with user and password is refused: {REMEDY}")
    return url


def unchained(url: str, *, also_paths: bool = True) -> str:
    """The URL. Raises ValueError for `::` in a name, by which fsspec would split it.

    A chain ends with a URL or a path, as `simplecache::https://host/list.csv`.

    Args:
        also_paths: whether fsspec opens a path, too; False: only a text with `://` is for fsspec.
    """
    *links, end = url.split("::") if also_paths or "://" in url else (url,)
    chains = CHAINING.issuperset(link.partition("://")[0] for link in links)
    if links and not (CHAINED.match(end) and chains):
        raise ValueError(
            "`::` chains URLs, such as zip://a.csv::s3://bucket/a.zip, and this is no chain: give "
            "another name"
        )
    return url


def _masked(parameter: re.Match[str]) -> str:
    return parameter[0] if HARMLESS.fullmatch(parameter[1]) else f"{parameter[1]}=..."


def one_line(error: BaseException, length: int = 300) -> str:
    """An error's message without secrets and line breaks; its class if it has no message."""
    # Secrets are removed first: a secret that is cut off is not recognized.
    return without_secrets(" ".join(str(error).split()))[:length] or type(error).__name__


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
    """An error whose message, causes and group have no secrets: itself, or a RuntimeError."""
    seen = {} if seen is None else seen
    if id(error) not in seen:
        seen[id(error)] = _redact(error)
        silent = error.__suppress_context__
        for name in ("__cause__", "__context__"):
            if (link := getattr(error, name)) is not None:
                setattr(seen[id(error)], name, redacted(link, seen))
        seen[id(error)].__suppress_context__ = silent
        if isinstance(error, BaseExceptionGroup):
            for inner in error.exceptions:
                redacted(inner, seen)
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
        return RuntimeError(f"{kind.__qualname__}: {text}").with_traceback(error.__traceback__)
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


def hide_secrets(settings: Any, name: str = "") -> Any:
    """The settings with each secret as a SecretStr, which Prefect stores as asterisks."""
    if isinstance(settings, dict):
        return {key: hide_secrets(value, key) for key, value in settings.items()}
    if isinstance(settings, list):
        return [hide_secrets(value, name) for value in settings]
    if isinstance(settings, SecretStr):
        return settings
    if is_secret(name, settings) or (isinstance(settings, str) and has_secrets(settings)):
        return SecretStr(str(settings))
    return settings
