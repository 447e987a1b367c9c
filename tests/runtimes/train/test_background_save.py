"""Checkpoints are written beside the training, which has their errors and the host's memory."""

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from runtimes.process.job import SilentEvents
from runtimes.train.checkpoints import CheckpointError, Checkpoints, Saver
from runtimes.train.trackers import Trackers


class Arrays(dict[str, Any]):
    """A dict that can be referred to weakly."""


def test_a_write_that_failed_leaves_the_state_s_memory_to_the_next_one(tmp_path: Path) -> None:
    """At once: a runtime's process looks for reference cycles rarely."""
    (tmp_path / "checkpoints").touch()  # no folder can be made there
    arrays, saver = Arrays(a=np.ones(3, np.float32)), Saver(Trackers([]).flush, SilentEvents())
    kept, checkpoints = weakref.ref(arrays), Checkpoints(str(tmp_path), keep=2)
    gc.disable()
    try:
        saver.start(1, 0.0, partial(checkpoints.save, 1, {"weights": arrays}, ["{}"], {}))
        del arrays
        error = saver.wait()
        saver.close()
        assert isinstance(error, CheckpointError) and kept() is None
    finally:
        gc.enable()
