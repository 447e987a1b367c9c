"""Prefect's own server, for one run: started before it, and ended with it."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any


def start_server() -> None:
    """Start Prefect's own server with SIGINT blocked.

    Ctrl-C would otherwise end the server before the run, and Prefect's client would retry its last
    request for a minute.
    """
    from prefect.server.api.server import SubprocessASGIServer

    class Server(SubprocessASGIServer):
        def _run_uvicorn_command(self) -> subprocess.Popen[Any]:
            process = super()._run_uvicorn_command()
            _end_after_us(process.pid)
            return process

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the server inherits it
    try:
        Server().start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _end_after_us(pid: int) -> None:
    """Have the server terminated once this process has ended, whichever signal ends it.

    Prefect stops its server only at an orderly exit; its own handler of SIGTERM prevents that.
    """
    ours, _ = os.pipe()  # its other end closes with this process: nobody else inherits it
    is_server = f"grep -q prefect.server /proc/{pid}/cmdline"  # a number is given again
    subprocess.Popen(
        ["sh", "-c", f"read _; {is_server} && kill {pid}"],
        stdin=ours,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(ours)
