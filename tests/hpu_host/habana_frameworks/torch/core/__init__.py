"""The end of a graph, in lazy mode."""

from hpu_emulator.graphs import mark_step

import habana_frameworks.torch  # noqa: F401

__all__ = ["mark_step"]
