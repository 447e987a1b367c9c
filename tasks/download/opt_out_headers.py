"""The header by which a web host opts out of training (X-Robots-Tag)."""

from __future__ import annotations

from collections.abc import Collection

from multidict import MultiMapping

#: Directives with a colon, which other lines have behind the name of an agent.
VALUED = {"max-snippet", "max-image-preview", "max-video-preview", "unavailable_after"}


def is_opted_out(headers: MultiMapping[str], user_agent: str, directives: Collection[str]) -> bool:
    """Whether a response's X-Robots-Tag has one of the directives, such as `noai`, for the agent.

    A name and a colon before directives limit them to one agent. Source: Google's page "Robots meta
    tag, data-nosnippet, and X-Robots-Tag specifications".

    Args:
        user_agent: our token; directives for other agents do not count.
        directives: in lower case.
    """
    for value in headers.getall("X-Robots-Tag", []):
        agent = None
        for part in value.lower().split(","):
            name, colon, directive = (text.strip() for text in part.partition(":"))
            is_agent = colon and name not in VALUED and " " not in name  # a time has spaces
            if is_agent:
                agent = name
            found = directive if is_agent else name
            if found in directives and agent in (None, user_agent.lower()):
                return True
    return False
