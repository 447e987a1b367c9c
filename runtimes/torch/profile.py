"""A trace of some steps, for TensorBoard's profiler plugin, Perfetto or chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, tensorboard_trace_handler


@contextmanager
def tracing(folder: Path, device: torch.device) -> Iterator[None]:
    """Trace what happens within, into `<folder>/<host>_<process>.<time>.pt.trace.json.gz`."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    handler = tensorboard_trace_handler(str(folder), use_gzip=True)
    with profile(activities=activities, record_shapes=True, on_trace_ready=handler):
        yield
        if device.type != "cpu":
            # What is still on its way belongs to these steps.
            torch.get_device_module(device).synchronize(device)
