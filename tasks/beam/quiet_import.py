"""Import Beam without its warning about an optional Google client."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_import() -> Iterator[None]:
    """Discard records of the root logger during the block."""
    root = logging.getLogger()
    silence = logging.NullHandler()
    nothing = logging.Filter("no logger of this name")
    root.addHandler(silence)  # otherwise logging would install a default handler
    root.addFilter(nothing)
    try:
        yield
    finally:
        root.removeFilter(nothing)
        root.removeHandler(silence)
