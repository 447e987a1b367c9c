"""Halts a process of `kiln` before it writes a record, so that a kill lands there on any machine.

Python imports this module at its start from a folder on PYTHONPATH. KILN_TEST_HALT is a JSON
object: `record`, a regular expression of the record's path; `number`, which of them a process
halts at, counted from 1; and `told`, a file that then gets its pid.
"""

import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

from artifacts import commit

HALT = json.loads(os.environ["KILN_TEST_HALT"])
IN_TURN = threading.Lock()
seen = 0


def halting(fs: Any, path: str, data: bytes, *check: Any) -> str | None:
    """As write_atomic; from the record to halt at on, no thread gets through."""
    global seen
    if re.search(HALT["record"], path) is None:
        return write(fs, path, data, *check)
    with IN_TURN:
        seen += 1
        if seen == HALT["number"]:
            Path(HALT["told"] + ".new").write_text(str(os.getpid()))
            Path(HALT["told"] + ".new").rename(HALT["told"])
            time.sleep(3600)
        return write(fs, path, data, *check)


write, commit.write_atomic = commit.write_atomic, halting
