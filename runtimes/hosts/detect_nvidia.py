"""Detect the memory of NVIDIA GPUs by their driver's tool; neither PyTorch nor CUDA is loaded."""

from __future__ import annotations

import subprocess

QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
SECONDS = 20.0  # a GPU without persistence mode starts first


def gpu_memory() -> list[int]:
    """Bytes of memory of each GPU; empty without a GPU, driver or tool."""
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=SECONDS, check=True)
        return [int(line) * 2**20 for line in done.stdout.split()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
