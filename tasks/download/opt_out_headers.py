"""The header by which a web host opts out of training (X-Robots-Tag), read as by img2dataset."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

from tasks.download.import_img2dataset_modules import img2dataset_module


def is_opted_out(headers: Any, user_agent: str, directives: Collection[str]) -> bool:
    """Whether a response's X-Robots-Tag has one of the directives, such as `noai`, for the agent.

    Args:
        headers: of the response, with the method `get_all` of email.message.Message.
        user_agent: our token; directives for other agents do not count.
    """
    return bool(_is_disallowed()(headers, user_agent, directives))


@cache
def _is_disallowed() -> Any:
    """img2dataset's check, imported on demand: the import takes half a second."""
    return img2dataset_module("downloader").is_disallowed
