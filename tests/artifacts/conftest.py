"""Stores on disks, in memory and in buckets."""

from pathlib import Path

import pytest
from store_servers import REMOTE, UrlOf

from artifacts.store import Store


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, url_of: UrlOf) -> Store:
    return Store(url_of(request.param))


@pytest.fixture(params=["local", "memory", *REMOTE])
def any_store(request: pytest.FixtureRequest, url_of: UrlOf) -> Store:
    return Store(url_of(request.param))


@pytest.fixture
def local(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))
