"""A stand-in for the Python interpreter of jobs: each job is a fork of a process with PyTorch.

A job's process is as usual: a session of its own, its arguments, variables, streams and exit
status. Only its imports are not repeated: they take longer than the job of a tiny model.
"""

from __future__ import annotations

import fcntl
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

#: Modules of a job of runtime torch, with PyTorch, diffusers and transformers.
IMPORTED = ("runtimes.torch.runtime", "runtimes.torch.sampler", "runtimes.train.trainer")
#: The stand-in: passes arguments, variables and streams on, then waits for the exit status.
CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
from contextlib import suppress

connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
passed = (os.environ.get(name) for name in {passed!r})
streams = sorted({{0, 1, 2}} | {{int(number) for number in passed if number}})
request = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd(), streams]).encode()
connection.sendall(len(request).to_bytes(8, "big"))
socket.send_fds(connection, [b"s"], streams)
connection.sendall(request)
for stream in streams:
    os.close(stream)  # the job alone holds them
answers = connection.makefile()
job = int(answers.readline())
def forward(number, _):
    with suppress(ProcessLookupError):
        os.kill(job, number)
signal.signal(signal.SIGTERM, forward)
status = int(answers.readline())
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@contextmanager
def warm_interpreter(folder: Path) -> Iterator[Path]:
    """The path of an executable that takes `-P -u -m runtimes ...` as Python does.

    Args:
        folder: an empty folder for the executable, its socket and the log.
    """
    from runtimes.process.events import EVENT_FD

    address, client = folder / "socket", folder / "python"
    text = CLIENT.format(python=sys.executable, address=str(address), passed=[EVENT_FD])
    client.write_text(text, encoding="utf-8")
    client.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener, (folder / "log").open("wb") as log:
        listener.bind(str(address))
        listener.listen()
        server = subprocess.Popen(
            [sys.executable, "-P", __file__, str(listener.fileno())],
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield client
        finally:
            server.kill()
            server.wait()


def main(number: str) -> None:
    """Serve requests on a listening socket; each in a process of its own."""
    for name in IMPORTED:
        __import__(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    with socket.socket(fileno=int(number)) as listener:
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                _serve(connection)
                os._exit(0)
            connection.close()


def _serve(connection: socket.socket) -> None:
    """Run one request; answer with the job's pid, then with its exit status."""
    size = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 16)
    request = json.loads(connection.recv(size, socket.MSG_WAITALL))
    job = os.fork()
    if job == 0:
        connection.close()
        _become(request, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    connection.sendall(f"{job}\n".encode())
    ended = os.pidfd_open(job)
    ready, _, _ = select.select([ended, connection], [], [])
    if ended not in ready:  # the client was killed
        with suppress(ProcessLookupError):
            os.killpg(job, signal.SIGKILL)
    _, status = os.waitpid(job, 0)
    with suppress(OSError):
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _become(request: list[Any], descriptors: list[int]) -> NoReturn:
    """Run the requested module as a program, in this process."""
    arguments, variables, folder, streams = request
    os.setsid()
    free = max(*streams, *descriptors) + 1
    copies = [fcntl.fcntl(one, fcntl.F_DUPFD, free) for one in descriptors]
    for copy, stream in zip(copies, streams, strict=True):
        os.dup2(copy, stream)
    for descriptor in {*descriptors, *copies} - set(streams):
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    module = arguments.index("-m") + 1
    sys.argv = arguments[module:]
    runpy.run_module(arguments[module], run_name="__main__", alter_sys=True)
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
