"""How pytest is set up: groups share one worker, and a failed comparison is told in short."""

import os

import pytest
from _pytest.compat import running_on_ci


@pytest.mark.xdist_group("of its own")
@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="no workers share the tests")
def test_the_scheduler_knows_the_group_of_a_test(request: pytest.FixtureRequest) -> None:
    assert request.node.nodeid.endswith("@of its own")


def test_a_failed_comparison_is_cut_short_on_a_ci_server_too() -> None:
    assert not running_on_ci()  # it spells out differences of long lists, and that takes hours
