"""Tests in this folder are left out with runtime jax."""

import chips
import pytest


@pytest.fixture(scope="session", autouse=True)
def _chosen() -> None:
    if reason := chips.not_chosen("jax"):
        pytest.skip(reason)
