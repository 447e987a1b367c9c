"""Trace steps with torch.profiler, for TensorBoard, Perfetto or chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, tensorboard_trace_handler


@contextmanager
def tracing(folder: Path, device: torch.device) -> Iterator[None]:
    """Trace the context to `<folder>/<host>_<process>.<time>.pt.trace.json.gz`."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    handler = tensorboard_trace_handler(str(folder), use_gzip=True)
    with profile(activities=activities, record_shapes=True, on_trace_ready=handler):
        yield
        if device.type != "cpu":
            # Kernels of these steps may still be running.
            torch.get_device_module(device).synchronize(device)
