"""Whose X-Robots-Tag excludes a picture."""

import pytest
from multidict import CIMultiDict

from tasks.download.politeness import is_opted_out


@pytest.mark.parametrize(
    ("values", "is_ours"),
    [
        (["noai"], True),
        (["noindex, NoAI"], True),
        (["all", "noimageai"], True),
        (["kilnworks: noai"], True),
        (["KilnWorks: nofollow, noai"], True),
        (["otherbot: noai"], False),
        (["otherbot: nofollow, noai"], False),
        (["otherbot: nofollow, kilnworks: noai"], True),
        (["kilnworks: nofollow, otherbot: noai"], False),
        (["noai, otherbot: nofollow"], True),
        (["max-snippet: -1, noai"], True),
        (["noai, max-image-preview: large"], True),
        (["unavailable_after: Saturday, 25 Jun 2039 15:00:00 PST, noai"], True),
        (["nosnippet"], False),
        ([], False),
    ],
)
def test_a_directive_counts_for_all_agents_or_the_named_one(
    values: list[str], is_ours: bool
) -> None:
    headers = CIMultiDict([("x-robots-tag", value) for value in values])
    assert is_opted_out(headers, "Kilnworks", {"noai", "noimageai"}) == is_ours
