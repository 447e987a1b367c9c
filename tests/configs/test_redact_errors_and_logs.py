"""Errors and log lines have no secrets, whichever library wrote them."""

import copy
import logging
import traceback
from typing import Any

import aiohttp
import pytest
from yarl import URL

from configs.errors import Refused
from configs.secrets import RedactedRecord, one_line, redacted_errors

URL_ = "https://us:pass0@example.org/a?w=1&sig=s1g"
SHOWN = "https://example.org/a?w=1&sig=..."


def response_error() -> aiohttp.ClientResponseError:
    request: Any = aiohttp.RequestInfo(URL(URL_), "GET", {}, URL(URL_))  # type: ignore[arg-type]
    return aiohttp.ClientResponseError(request, (), status=500)


ERRORS = [
    ValueError(f"no answer of {URL_}"),
    KeyError(URL_),
    Refused(f"store {URL_}: refused"),
    FileNotFoundError(2, "No such file", URL_),
    OSError(f"{URL_} is away"),
    response_error(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_keeps_its_class_and_loses_its_secrets(error: Exception) -> None:
    kind = type(error)
    with pytest.raises(kind) as raised, redacted_errors():
        try:
            raise error
        except kind as cause:
            raise copy.copy(error) from cause
    printed = "".join(traceback.format_exception(raised.value))
    assert kind.__name__ in printed and type(raised.value).__module__ == kind.__module__
    assert SHOWN in str(raised.value) and printed.count(SHOWN) >= 2
    assert "pass0" not in printed and "s1g" not in printed


def test_a_group_and_the_error_before_an_error_lose_their_secrets() -> None:
    with pytest.raises(ExceptionGroup) as raised, redacted_errors():
        try:
            raise response_error()
        except aiohttp.ClientError:
            raise ExceptionGroup("several", [ValueError(URL_)])  # noqa: B904
    printed = "".join(traceback.format_exception(raised.value))
    assert printed.count(SHOWN) == 2
    assert "pass0" not in printed and "s1g" not in printed


def test_an_error_of_an_extension_module_is_replaced() -> None:
    from pydantic import BaseModel, ValidationError

    class Model(BaseModel):
        number: int

    words = "ValidationError: 1 validation error"
    with pytest.raises(RuntimeError, match=words) as raised, redacted_errors():
        try:
            Model.model_validate({"number": URL_})
        except ValidationError as error:
            frames = len(traceback.extract_tb(error.__traceback__))
            raise
    assert "s1g" not in "".join(traceback.format_exception(raised.value))
    assert len(traceback.extract_tb(raised.value.__traceback__)) > frames


def test_an_error_without_secrets_is_raised_as_it_is() -> None:
    error = FileNotFoundError(2, "No such file", "/tmp/a")
    with pytest.raises(FileNotFoundError) as raised, redacted_errors():
        raise error
    assert raised.value is error and error.filename == "/tmp/a" and error.errno == 2


def test_one_line_removes_a_secret_before_it_cuts() -> None:
    error = ValueError("x" * 280 + f"\n{URL_}")
    assert one_line(error) == ("x" * 280 + f" {SHOWN}")[:300]
    assert one_line(ValueError()) == "ValueError"


def test_a_log_line_and_its_traceback_have_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "_logRecordFactory", RedactedRecord)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(handler.format(record))  # type: ignore[method-assign]
    logger = logging.getLogger("a library")
    logger.addHandler(handler)
    try:
        raise response_error()
    except aiohttp.ClientError:
        logger.exception("GET %s", URL_)
    logger.removeHandler(handler)
    assert lines[0].startswith(f"GET {SHOWN}\nTraceback")
    assert "pass0" not in lines[0] and "s1g" not in lines[0]
