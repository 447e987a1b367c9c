"""Web servers for the tests of the download stage."""

from collections.abc import Iterator

import pytest
from picture_server import Web
from web_sites import Site


@pytest.fixture
def web() -> Iterator[Web]:
    with Web() as web:
        yield web


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    with site.server:
        yield site
