"""The end of a runtime's process."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """Run the exit handlers, write what is buffered, and end this process with `code`.

    The interpreter is not taken down: threads of PyTorch's collectives outlive their last result,
    and one that then drops a tensor aborts the process.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it, or it is closed
            stream.flush()
    os._exit(code)
