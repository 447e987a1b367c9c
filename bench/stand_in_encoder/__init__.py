"""Encoders and a describer that need a fixed time per batch and no processor, as accelerators."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from configs.load_recipe import CHECKOUT
from runtimes.registry import RUNTIMES, RuntimeSpec
from tasks.describe.describers import KINDS

NAME = "stand-in"
#: `exclusive`: one device has a process of its own, too.
SPEC = RuntimeSpec("bench.stand_in_encoder", (), exclusive=True)


@contextmanager
def registered() -> Iterator[None]:
    """Both are in the tables of this process, and their module is found by child processes."""
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    describer = ("bench.stand_in_encoder.describer", "StandIn")
    with (
        patch.dict(RUNTIMES, {NAME: SPEC}),
        patch.dict(KINDS, {NAME: describer}),
        patch.dict(os.environ, PYTHONPATH=path),
    ):
        yield
