"""A runtime whose encoders need a fixed time per batch and no processor, as an accelerator does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from configs.load_recipe import CHECKOUT
from runtimes.registry import RUNTIMES, RuntimeSpec

NAME = "stand-in"
#: `exclusive`: one device has a process of its own, too.
SPEC = RuntimeSpec("bench.stand_in_encoder", (), exclusive=True)


@contextmanager
def registered() -> Iterator[None]:
    """The runtime is in the table of this process, and its module is found by child processes."""
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    with patch.dict(RUNTIMES, {NAME: SPEC}), patch.dict(os.environ, PYTHONPATH=path):
        yield
