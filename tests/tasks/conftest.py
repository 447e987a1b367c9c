"""Web servers and registries for tests of the stages."""

from collections.abc import Iterator

import pytest
from picture_server import Web
from store_servers import REMOTE, UrlOf
from web_sites import Site

from artifacts.store import Store
from tasks.publish.model_registry import Registry


@pytest.fixture
def web() -> Iterator[Web]:
    with Web() as web:
        yield web


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    with site.server:
        yield site


@pytest.fixture(params=["local", "memory"])
def registry(request: pytest.FixtureRequest, url_of: UrlOf) -> tuple[Store, Registry]:
    url = url_of(request.param)
    return Store(url), Registry(f"{url}/registry", "digits")


@pytest.fixture(params=["local", "memory", *REMOTE])
def any_registry(request: pytest.FixtureRequest, url_of: UrlOf) -> tuple[Store, Registry]:
    url = url_of(request.param)
    return Store(url), Registry(f"{url}/registry", "digits")
