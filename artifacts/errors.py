"""Errors of libraries: what they mean for a run, in the words of Kilnworks, and another try.

The libraries are the clients of remote stores and of web servers, and the operating system. A local
cache has errors of its own: its disk is full, or its folder cannot be written.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from configs.errors import Away, Failed, Refused, UserError
from configs.secrets import one_line

log = logging.getLogger("kiln")
T = TypeVar("T")

#: Packages that the clients of remote stores are made of; not all their errors are an OSError.
_CLIENTS = (
    *("aiobotocore", "aiohttp", "botocore", "gcsfs", "httpx", "httpx2", "huggingface_hub"),
    *("google.api_core", "google.auth", "google.cloud", "google.resumable_media", "requests"),
)
#: Clients of web servers and of the hub.
_WEB_CLIENTS = ("aiohttp", "httpx", "httpx2", "huggingface_hub", "requests")
#: Readers of formats, whose errors are those of a file's content.
_READERS = ("_csv", "_duckdb", "duckdb", "pyarrow", "zlib")
#: The answers 4xx that may pass. All others are final, and 501.
_PASSING = {408, 425, 429}
#: Codes of S3's answers 400 and 409 that may pass, also of a body that was damaged on its way.
_PASSING_OF_S3 = {
    *("RequestTimeout", "PriorRequestNotComplete", "OperationAborted"),
    *("ConditionalRequestConflict", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch"),
}
#: Their answers that there is no such file, or no longer.
_ABSENT = {404, 410}
#: Errors of botocore and google.auth: there are no credentials. Machines in a cloud get them from
#: its service, which may not answer for a moment.
_NO_CREDENTIALS = {"NoCredentialsError", "DefaultCredentialsError"}
#: Their errors of a log-in that has expired, or of a wrong profile: a person has to act.
_NO_LOG_IN = {
    *("PartialCredentialsError", "ProfileNotFound", "ReauthFailError"),
    *("SSOTokenLoadError", "TokenRetrievalError", "UnauthorizedSSOTokenError"),
    *("LoginRefreshRequired", "LoginTokenLoadError"),
}

#: Errors of botocore and the hub's client: a wrong name of a bucket, no network by a setting, and
#: an answer that lacks what the hub's answers have.
_FINAL = {"FileMetadataError", "OfflineModeIsEnabled", "ParamValidationError"}

MEMORY = (
    "this machine has too little memory: free some, raise the limit (`ulimit -v`, or the "
    "container's), or have fewer processes run here at once"
)
#: Errors of the system that are the machine's, neither a row's nor a store's -> what is to be done.
SHORTAGES = {
    errno.ENOMEM: MEMORY,
    errno.EMFILE: "this process can open no more files and connections: raise its limit "
    "(`ulimit -n`), or lower download.max_connections",
    errno.ENFILE: "this machine can open no more files and connections: raise its limit (`sysctl "
    "fs.file-max`), or close other programs",
    errno.ENOBUFS: "this machine has no memory for more connections: lower "
    "download.max_connections",
    errno.EADDRNOTAVAIL: "this machine has no free port for more connections: close other "
    "programs, or lower download.max_connections",
}


def classify(error: Exception, url: str | None = None, *, reads: str | None = None) -> Exception:
    """What an error means for a run: a Refused, an Away or a Failed of one line, with its remedy.

    Args:
        url: the URL of the store or input in use; None: a store whose URL is not known here.
            An error of the system must then name a file.
        reads: the input in words, such as `model s3://bucket/sdxl`; what it lacks or forbids is
            wrong input. None: the place is a store, which is written, too.

    Returns:
        The error itself if it is one of Kilnworks, has another cause than the place, or is a bug.
    """
    if isinstance(error, UserError):
        return error
    if lacking := shortage(error):
        return Away(f"{lacking}, then run again ({one_line(error)})")
    if reads is not None:
        return _of_input(error, url or "", reads)
    return _of_store(error, url)


def _of_input(error: Exception, url: str, name: str) -> Exception:
    is_local = "://" not in url or "::" in url or url.startswith(("file:", "local:"))
    is_of_cache = not is_local and os.path.isabs(target_of(error) or "")  # on this machine
    if is_full(error) or is_of_cache:
        return error
    cause = web_cause(url, error)
    if isinstance(cause, FileNotFoundError):
        return Refused(f"{name}: no such file or folder")
    why = one_line(cause)
    if is_outage(cause):
        return Away(f"{name}: cannot be read now ({why})", remedy=remedy(cause))
    if "support range requests" in why:
        what = f"{name}: its web server gives no parts of a file (range requests)"
        return Refused(what, remedy="download the file and name its path")
    is_of_content = isinstance(cause, OSError | ValueError | ImportError | EOFError)
    if is_of_content or is_of_client(cause) or _is_of(_READERS, type(cause).__module__):
        return Refused(f"{name}: cannot be read: {why}")
    return error


def _of_store(error: Exception, url: str | None) -> Exception:
    number = getattr(error, "errno", None)
    file = target_of(error)
    is_client = is_of_client(error)
    is_remote = url is not None and "://" in url
    store = url or "the store"
    if is_full(error):
        if file is None and is_remote:  # in the cache or for temporary files: no bucket is full
            why = getattr(error, "strerror", None) or one_line(error)
            what = f"no space left on this machine ({why})"
            return Away(what, remedy="free some, then run again")
        place = file or f"{store}, or for temporary files in {tempfile.gettempdir()}"
        advice = "free some (try `kiln gc`), then run again"
        return Away(f"no space left for {place}", remedy=advice)
    if url is None and number is not None and file is None and not is_client:
        return error
    if lacks_credentials(error):
        kind = Away if is_outage(error) else Failed
        what = f"no valid credentials for {store} ({one_line(error)})"
        return kind(what, remedy=remedy(error))
    if is_forbidden(error) or number in (errno.EPERM, errno.EROFS):
        place = file or f"{store} ({one_line(error)})"  # an error of a bucket names no file
        advice = "grant it, or choose another folder or URL"
        return Failed(f"no permission for {place}", remedy=advice)
    if is_client and (is_remote or url is None):
        if not is_outage(error):
            return Failed(f"{store} cannot be used ({one_line(error)})", remedy="correct its URL")
        return Away(f"{store} cannot be used now ({one_line(error)})", remedy=remedy(error))
    return error


@contextmanager
def reading(name: str, url: str) -> Iterator[None]:
    """Raise what the errors of reading an input mean, see `classify`.

    Args:
        name: the input in words.
    """
    try:
        yield
    except Exception as error:  # each filesystem's client has errors of its own
        meaning = classify(error, url, reads=name)
        if meaning is error:
            raise
        raise meaning from None


def may_pass(error: BaseException) -> bool:
    """Whether another try may succeed."""
    return isinstance(error, Away) or is_outage(error)


#: Seconds before each further try, besides those of a store's own client.
WAITS = (10.0, 60.0, 300.0)


def retrying(
    work: Callable[[], T],
    waits: Iterable[float] = WAITS,
    *,
    passes: Callable[[Exception], bool] = may_pass,
    words: Callable[[Exception], str] = one_line,
) -> T:
    """The result of `work`, which is tried again after an error that may pass.

    Args:
        waits: seconds before each further try.
        passes: whether another try may succeed after an error.
        words: an error in the log.
    """
    for seconds in waits:
        try:
            return work()
        except Exception as error:  # clients of remote stores define their own exception types
            if not passes(error):
                raise
            log.warning("%s; next attempt in %g seconds", words(error), seconds)
            time.sleep(seconds)
    return work()


class StoreRefused(OSError):
    """A remote store refused a request, and its client raised a ValueError."""


def is_of_client(error: BaseException) -> bool:
    """Whether an error is one of a remote store's client: no network, say, or no credentials.

    s3fs raises an OSError of the client's error, whose type says what is missing or forbidden, if
    anything is. It has none of its own for an outage.
    """
    if any(kind.__name__ == "StrictDataclassError" for kind in type(error).__mro__):
        return False  # the hub's package raises it for a wrong config.json on a local disk
    if isinstance(error, StoreRefused) or _is_of(_CLIENTS, type(error).__module__):
        return True
    if type(error) is OSError and error.__cause__ is not None:
        return _is_of(_CLIENTS, type(error.__cause__).__module__)
    return isinstance(error, ValueError) and _is_of(_CLIENTS, _raised_in(error))


def is_forbidden(error: BaseException) -> bool:
    """Whether a store denies access, or a person has to log in first.

    S3's client has no errno for the former, Google's no type of its own.
    """
    is_denied = isinstance(error, PermissionError) or str(error).startswith("Forbidden: ")
    return is_denied or _answer(error) == 403 or type(error).__name__ in _NO_LOG_IN


def lacks_credentials(error: BaseException) -> bool:
    """Whether a store's client has no credentials, or those that the store does not accept.

    Without any, gcsfs asks anonymously, and the answer is an error with the code 401.
    """
    return _answer(error) == 401 or type(error).__name__ in _NO_CREDENTIALS | _NO_LOG_IN


def is_full(error: BaseException) -> bool:
    """Whether a disk, or the share of it that this user may have, is full."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)


def shortage(error: BaseException) -> str | None:
    """What this machine lacks and what is to be done, by an error; None if it lacks nothing."""
    if isinstance(error, MemoryError):
        return MEMORY
    return SHORTAGES.get(getattr(error, "errno", None) or 0)


def target_of(error: Exception) -> str | None:
    """The file that an error of the system names; for a copy, its destination."""
    files = (getattr(error, name, None) for name in ("filename2", "filename"))
    return next((str(file) for file in files if isinstance(file, str | Path)), None)


def is_outage(error: BaseException) -> bool:
    """Whether a remote store, or the way to it, failed in a way that may pass.

    Credentials that are not found may come back. The checks before a run, which report their
    absence first, have no retries.
    """
    if type(error).__name__ == "LocalEntryNotFoundError":  # the hub's; its cause is why it asked
        return error.__cause__ is not None and is_outage(error.__cause__)
    if is_forbidden(error) or _is_final(error):
        return False
    return isinstance(error, ConnectionError | TimeoutError) or is_of_client(error)


def remedy(error: BaseException) -> str:
    """What a person can do about an outage."""
    if lacks_credentials(error):
        return "log in by its cloud's tool, or set credentials in the environment"
    if getattr(error, "errno", None) == socket.EAI_NONAME:  # from aiohttp: an unknown host
        return "correct the host's name, or run again later"
    return "run again later"


def web_cause(url: str, error: Exception) -> Exception:
    """The error of a file: fsspec raises FileNotFoundError of all answers of a web server."""
    is_web = url.startswith(("http://", "https://")) and isinstance(error, FileNotFoundError)
    cause = error.__cause__ if is_web else None
    return cause if isinstance(cause, Exception) and _answer(cause) not in _ABSENT else error


@contextmanager
def refusals() -> Iterator[None]:
    """Raise StoreRefused instead of a client's ValueError, which otherwise means damaged data.

    gcsfs raises ValueError for any refusal, even a 503, whose text has the word `invalid`.
    """
    try:
        yield
    except ValueError as error:
        if not is_of_client(error):
            raise
        raise StoreRefused(str(error)) from error


def _answer(error: BaseException) -> Any:
    """The HTTP status in a client's error, if any: aiohttp's `code` is deprecated for `status`."""
    if not is_of_client(error):
        return None
    if reply := _reply_of_s3(error):
        return reply.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if (response := getattr(error, "response", None)) is not None:  # the hub's
        return getattr(response, "status_code", None)
    return getattr(error, "status" if hasattr(error, "status") else "code", None)


def _reply_of_s3(error: BaseException) -> dict[str, Any]:
    """What S3 answered, which s3fs has in the cause of its error; empty if it is no answer."""
    reply = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    return reply if isinstance(reply, dict) else {}


def _is_final(error: BaseException) -> bool:
    """Whether a server would answer the same again, or the URL is none."""
    if type(error).__name__ in _FINAL:
        return True
    if _reply_of_s3(error).get("Error", {}).get("Code") in _PASSING_OF_S3:
        return False
    answer = _answer(error)
    is_web = _is_of(_WEB_CLIENTS, type(error).__module__)
    if answer == 401 and not is_web:  # from gcsfs without credentials, which may come back
        return False
    refused = isinstance(answer, int) and answer >= 400 and not is_passing(answer)
    return refused or (is_web and isinstance(error, ValueError))


def is_passing(answer: int) -> bool:
    """Whether a server that answers so may answer otherwise later."""
    return answer in _PASSING or (answer >= 500 and answer != 501)


def _is_of(packages: tuple[str, ...], module: str) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def _raised_in(error: BaseException) -> str:
    """Name of the module that raised an error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__", "")) if frames else ""


@contextmanager
def caching(folder: Path, variable: str = "KILN_CACHE") -> Iterator[None]:
    """Convert errors of a cache's disk and folder; others, as those of a network, pass through.

    Args:
        variable: the variable of the environment that names another folder.

    Raises:
        Away, Failed: the cache cannot be written.
    """
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise Away(
                f"no space left for the cache {folder}: free space in it, or set {variable} to a "
                "folder on another disk"
            ) from error
        place = Path(str(error.filename or "."))
        # A folder above the cache has to be made, too.
        is_of_cache = place.is_relative_to(folder) or folder.is_relative_to(place)
        if not (place.is_absolute() and is_of_cache):
            raise
        raise Failed(
            f"the cache {folder} cannot be written ({error.strerror}): set {variable} to a "
            "writable folder"
        ) from error
