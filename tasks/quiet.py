"""Import Beam without its warning of a Google client that nothing here needs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_import() -> Iterator[None]:
    """Keep what is logged to the root logger meanwhile from being shown."""
    root, silence = logging.getLogger(), logging.NullHandler()

    def nothing(record: logging.LogRecord) -> bool:
        return False

    root.addHandler(silence)  # or logging would set up a handler of its own for the warning
    root.addFilter(nothing)
    try:
        yield
    finally:
        root.removeFilter(nothing)
        root.removeHandler(silence)
