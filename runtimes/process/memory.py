"""Peak memory of this process."""

from __future__ import annotations

import re
from pathlib import Path


def peak_rss() -> int:
    """Peak resident memory of this process in bytes; 0 on systems without /proc."""
    # Not ru_maxrss: a child process inherits its parent's value, which may be larger.
    path = Path("/proc/self/status")
    status = path.read_text(encoding="ascii") if path.exists() else ""
    peak = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(peak[1]) * 1024 if peak else 0
