"""Memory of this process: its peak, garbage collection, and mapped files."""

from __future__ import annotations

import gc
import re
import resource
from pathlib import Path

#: Open files that macOS allows a process whose hard limit is infinite.
OPEN_MAX = 10_240


def peak_rss() -> int:
    """Peak resident memory of this process in bytes; 0 on systems without /proc."""
    # Not ru_maxrss: a child process inherits its parent's value, which may be larger.
    path = Path("/proc/self/status")
    status = path.read_text(encoding="ascii") if path.exists() else ""
    peak = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(peak[1]) * 1024 if peak else 0


def collect_garbage_rarely() -> None:
    """Let Python look for garbage after 100,000 new objects instead of 700.

    Imports and traces of models make millions of objects that live on, and each search visits
    them again: a tenth of the time that PyTorch, diffusers and transformers take to import.
    """
    gc.set_threshold(100_000, 50, 100)


def check_memory(size: int) -> None:
    """Raise MemoryError if this process cannot have `size` more bytes.

    Decoders report a failed allocation as damaged data. The bytes are not touched, so this takes
    microseconds and no memory.
    """
    bytes(size)


def raise_open_file_limit() -> int:
    """Allow as many open files as the system does; how many.

    Each mapped shard keeps a file descriptor, and each connection. The usual soft limit, 1,024, is
    less than 32 shards in each of 33 aspect buckets.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_MAX if hard == resource.RLIM_INFINITY else hard  # macOS refuses infinity
    if soft >= most:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most
