"""Halts a process of `kiln` before it writes a record, so that a kill lands there on any machine.

Python imports this module at its start from a folder on PYTHONPATH. KILN_TEST_HALT is a JSON
object: `record`, a regular expression of the record's path; `number`, which of them a process
halts at, counted from 1; and `told`, a file that then gets its pid. Of several processes, only
the first to get there halts.
"""

import json
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from artifacts import compare_and_swap, records

HALT = json.loads(os.environ["KILN_TEST_HALT"])
IN_TURN = threading.Lock()
seen = 0


def halting(write: Callable[..., Any]) -> Callable[..., Any]:
    """As `write(fs, path, ...)`; from the record to halt at on, no thread gets through."""

    def halted(fs: Any, path: str, *rest: Any) -> Any:
        global seen
        if re.search(HALT["record"], path) is None:
            return write(fs, path, *rest)
        with IN_TURN:
            seen += 1
            if seen == HALT["number"] and is_first():
                time.sleep(3600)
            return write(fs, path, *rest)

    return halted


def is_first() -> bool:
    """Write this process's pid to `told`, unless another process has."""
    own = Path(f"{HALT['told']}.{os.getpid()}")
    own.write_text(str(os.getpid()))
    try:
        os.link(own, HALT["told"])
    except FileExistsError:
        return False
    return True


records.write_atomic = halting(records.write_atomic)
compare_and_swap.create = halting(compare_and_swap.create)
