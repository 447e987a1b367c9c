"""The header by which a web host opts out of training (X-Robots-Tag), read as by img2dataset."""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import cache
from typing import Any


def is_opted_out(headers: Any, user_agent: str, directives: Collection[str]) -> bool:
    """Whether a response's X-Robots-Tag has one of the directives, such as `noai`, for the agent.

    Args:
        headers: of the response, with the method `get_all` of email.message.Message.
        user_agent: our token; directives for other agents do not count.
    """
    return bool(_is_disallowed()(headers, user_agent, directives))


@cache
def _is_disallowed() -> Any:
    """img2dataset's check, imported on demand: the import takes seconds."""
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # no version check over the network
    from img2dataset.downloader import is_disallowed

    return is_disallowed
