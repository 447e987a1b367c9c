"""Jobs one after another in one process, so that a program is compiled once."""

import json
import logging
import os
import tempfile
from typing import Any

from runtimes.__main__ import main
from runtimes.process.job import EVENT_FD


def do(path: str) -> dict[str, Any]:
    """Do a job as `python -m runtimes JOB.json` does; its exit code and its events.

    Leaves nothing behind that the next job would find.
    """
    log = logging.getLogger("kiln")
    before = list(log.handlers)
    with tempfile.TemporaryFile("w+") as events:
        os.environ[EVENT_FD] = str(os.dup(events.fileno()))  # `main` closes it
        try:
            code = main([path])
        except SystemExit as ended:
            code = int(ended.code or 0)
        log.handlers[:] = before
        events.seek(0)
        return {"code": code, "events": [json.loads(line) for line in events]}
