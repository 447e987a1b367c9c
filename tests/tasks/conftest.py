"""A web server of pictures for the tests of the download stage."""

from collections.abc import Iterator

import pytest
from picture_server import Web


@pytest.fixture
def web() -> Iterator[Web]:
    with Web() as web:
        yield web
