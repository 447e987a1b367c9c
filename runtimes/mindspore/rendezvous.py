"""MindSpore's scheduler process, a rendezvous: `python -P -m runtimes.mindspore.rendezvous`.

msrun starts its own; in a run without msrun, rank 0 starts this server (parallel.py).
"""

from __future__ import annotations

import os
import sys
import threading


def serve() -> None:
    """Serve until all processes of the run have disconnected."""
    import mindspore as ms

    ms.set_device("CPU")
    ms.communication.init()


def _end_with_parent() -> None:
    """End with the parent process: its end of the standard input pipe closes when it ends."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    serve()
