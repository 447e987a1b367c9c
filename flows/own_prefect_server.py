"""Prefect's own server, for one run: started before it, and ended with it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from random import Random
from tempfile import TemporaryFile
from typing import Any


class NoOwnServer(RuntimeError):
    """Prefect's own server does not start."""


class HomeNotWritable(NoOwnServer, ValueError):
    """The folder of Prefect's own server cannot be written."""


def start_server() -> None:
    """Start Prefect's own server in a session of its own.

    Ctrl-C, or SIGTERM to the process group as of `timeout`, would otherwise end the server before
    the run. Prefect's client would then retry its last request for a minute, and the run would stay
    *Running* for good.

    Raises:
        HomeNotWritable: Prefect's home cannot be written.
        NoOwnServer: the server did not answer in time.
    """
    check_home()
    port = _free_port()
    early = [_serve(port)]
    # Prefect's client needs this module, too: seconds in which the server's process starts.
    from prefect.server.api import server

    class Server(server.SubprocessASGIServer):
        def _run_uvicorn_command(self) -> subprocess.Popen[Any]:
            assert self.port is not None
            return early.pop() if early else _serve(self.port)

    own = Server()  # the one instance that Prefect's client asks for
    own.port = port
    try:
        own.start()
    except RuntimeError as error:
        raise NoOwnServer(
            f"Prefect's own server did not start ({str(error).rstrip('.')}): run again, or start "
            "a lasting one (`make ui`) and set PREFECT_API_URL"
        ) from error


def check_home() -> None:
    """Raise HomeNotWritable unless the folder of the server's database can be written.

    Otherwise the server would print its tracebacks until Prefect's time limit.
    """
    from prefect.settings import get_current_settings

    home = get_current_settings().home
    try:
        home.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=home).close()
    except OSError as error:
        raise HomeNotWritable(
            f"Prefect's own server cannot write {home} ({error.strerror}): set PREFECT_HOME to a "
            "folder that can be written, or PREFECT_API_URL to a server"
        ) from error


def _free_port() -> int:
    """A port outside the range from which the kernel takes those of clients."""
    for port in Random().sample(range(8000, 9000), 1000):
        with socket.socket() as found, suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    raise NoOwnServer("Prefect's own server finds no free port from 8000 to 8999: free one")


def _serve(port: int) -> subprocess.Popen[Any]:
    """The process of a server, with the command and variables of Prefect's SubprocessASGIServer."""
    import prefect
    from prefect.settings import get_current_settings

    serve = ["-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
    serve += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    serve += ["--lifespan", "on", "--app-dir", str(prefect.__module_path__.parent)]
    process = subprocess.Popen(
        [sys.executable, *serve],
        env={
            **os.environ,
            "PREFECT_UI_ENABLED": "0",
            "PREFECT__SERVER_EPHEMERAL": "1",
            "PREFECT__SERVER_FINAL": "1",
            **get_current_settings().to_environment_variables(exclude_unset=True),
        },
        start_new_session=True,
    )
    _end_after_us(process.pid)
    return process


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
