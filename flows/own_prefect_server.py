"""Prefect's own server, for one run: started before it, and ended with it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any


class NoOwnServer(RuntimeError):
    """Prefect's own server does not start."""


def start_server() -> None:
    """Start Prefect's own server in a session of its own.

    Ctrl-C, or SIGTERM to the process group as of `timeout`, would otherwise end the server before
    the run. Prefect's client would then retry its last request for a minute, and the run would stay
    *Running* for good.

    Raises:
        NoOwnServer: Prefect's home cannot be written, or the server did not answer in time.
    """
    from prefect.server.api import server

    check_home()

    class Server(server.SubprocessASGIServer):
        def _run_uvicorn_command(self) -> subprocess.Popen[Any]:
            with _in_new_sessions(server):
                process = super()._run_uvicorn_command()
            _end_after_us(process.pid)
            return process

    try:
        Server().start()
    except RuntimeError as error:
        raise NoOwnServer(
            f"Prefect's own server did not start ({str(error).rstrip('.')}): run again, or start "
            "a lasting one (`make ui`) and set PREFECT_API_URL"
        ) from error


def check_home() -> None:
    """Raise NoOwnServer unless the folder of the server's database can be written.

    Otherwise the server would print its tracebacks until Prefect's time limit.
    """
    from prefect.settings import get_current_settings

    home = get_current_settings().home
    try:
        home.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=home).close()
    except OSError as error:
        raise NoOwnServer(
            f"Prefect's own server cannot write {home} ({error.strerror}): set PREFECT_HOME to a "
            "folder that can be written, or PREFECT_API_URL to a server"
        ) from error


@contextmanager
def _in_new_sessions(module: Any) -> Iterator[None]:
    """Let a module start its processes in sessions of their own: Prefect's has no option for it."""
    plain = module.subprocess
    module.subprocess = SimpleNamespace(**vars(plain))
    module.subprocess.Popen = partial(plain.Popen, start_new_session=True)
    try:
        yield
    finally:
        module.subprocess = plain


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
