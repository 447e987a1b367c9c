"""Memory of this process."""

from __future__ import annotations

import re
from pathlib import Path


def peak_of_process() -> int:
    """Most bytes that it had in memory so far; 0 where that is not told (not Linux)."""
    # Not ru_maxrss: a child starts with its parent's, which may have been larger.
    path = Path("/proc/self/status")
    status = path.read_text(encoding="ascii") if path.exists() else ""
    peak = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(peak[1]) * 1024 if peak else 0
