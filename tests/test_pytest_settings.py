"""Settings of pytest: xdist groups, and short differences of failed comparisons."""

import os

import pytest
from _pytest.compat import running_on_ci


@pytest.mark.xdist_group("of its own")
@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="no xdist worker")
def test_scheduler_has_the_group_of_a_test(request: pytest.FixtureRequest) -> None:
    assert request.node.nodeid.endswith("@of its own")


def test_failed_comparison_is_short_on_a_ci_server() -> None:
    assert not running_on_ci()  # on CI pytest prints full differences, for hours
