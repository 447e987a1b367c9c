"""Where the processes of a run find each other: `python -P -m runtimes.mindspore.rendezvous`.

msrun starts one itself; without msrun the first process of a run does (parallel.py).
"""

from __future__ import annotations

import os
import sys
import threading


def serve() -> None:
    """Until all of them have left."""
    import mindspore as ms

    ms.set_device("CPU")
    ms.communication.init()


def _end_with_parent() -> None:
    """When the process that started this one is no more, its end of our standard input closes."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    serve()
