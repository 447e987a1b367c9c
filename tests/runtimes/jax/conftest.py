"""A process of runtime jax with four virtual devices; no test of this folder runs without it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import chips
import pytest
from driver_process import DriverProcess
from jobs import MakeJob


@pytest.fixture(scope="session", autouse=True)
def _chosen() -> None:
    if reason := chips.not_selected("jax"):
        pytest.skip(reason)


@pytest.fixture
def make_job(make_job: MakeJob, tiny_model: Callable[[str], Path]) -> MakeJob:
    """On the least model: a larger one takes longer, and is in the conformance suite."""
    return partial(make_job, model=str(tiny_model("least-sdxl")))


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DriverProcess]:
    """JAX takes its number of devices when it starts."""
    file, folder = Path(__file__).with_name("driver.py"), tmp_path_factory.mktemp("jax")
    with closing(DriverProcess(file, sys.executable, folder, chips.ENVIRONMENT["jax"])) as process:
        yield process
