"""Memory of this host, without any accelerator."""

from __future__ import annotations

import os
from pathlib import Path

CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")  # "max" without a limit


def host_memory() -> int:
    """Bytes of the host's memory, or of its container's limit if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(CONTAINER_LIMIT.read_text(encoding="ascii")))
    except (OSError, ValueError):
        return total
