"""Run in a runtime's environment: jobs one after another, so that a program is compiled once.

    python -P warm_process.py FD    paths of jobs' files, one a line, on file descriptor FD

A job runs as by `python -m runtimes JOB.json`. The event `ended` follows, with its exit code.
"""

import json
import logging
import os
import sys

from runtimes.__main__ import main
from runtimes.events import EVENT_FD


def run(path: str, events: int) -> None:
    """Do one job; leave nothing of it behind that the next would find."""
    log = logging.getLogger("kiln")
    before = list(log.handlers)
    os.environ[EVENT_FD] = str(os.dup(events))  # `main` closes it
    try:
        code = main([path])
    except SystemExit as ended:
        code = ended.code
    log.handlers[:] = before
    os.write(events, json.dumps({"event": "ended", "code": code}).encode() + b"\n")


if __name__ == "__main__":
    said = int(os.environ[EVENT_FD])
    with os.fdopen(int(sys.argv[1])) as paths:
        for line in paths:
            run(line.strip(), said)
