"""Tests of a group share one worker: pytest and pytest-xdist must agree on how it is named."""

import os

import pytest


@pytest.mark.xdist_group("of its own")
@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="no workers share the tests")
def test_the_scheduler_knows_the_group_of_a_test(request: pytest.FixtureRequest) -> None:
    assert request.node.nodeid.endswith("@of its own")
