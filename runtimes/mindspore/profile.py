"""Trace steps with MindSpore's profiler, for MindStudio Insight or chrome://tracing."""

from __future__ import annotations

from contextlib import AbstractContextManager

from mindspore import profiler


def tracing(folder: str, target: str) -> AbstractContextManager[None]:
    """Trace the context to files below a local folder."""
    kinds = [profiler.ProfilerActivity.CPU]
    if target == "Ascend":
        kinds.append(profiler.ProfilerActivity.NPU)
    return profiler.profile(
        activities=kinds,
        on_trace_ready=profiler.tensorboard_trace_handler(folder),
    )
