"""Client of an encoder process (encoder_process.py)."""

from __future__ import annotations

import logging
import socket
import subprocess
import tempfile
import threading
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from runtimes.contract import WrongInput
from runtimes.registry import interpreter
from tasks.build_or_reuse import TransientError
from tasks.encode.encoder_process import (
    KNOWN,
    SHARDS_PER_DEVICE,
    EncodingPlan,
    receive,
    send,
)

END_SECONDS = 10.0
log = logging.getLogger("kiln")


class EncoderLost(TransientError):
    """The encoder process has ended; the message has the last line of its log."""


class EncoderFailed(RuntimeError):
    """A shard could not be encoded; the message has the error."""


class EncoderProcess:
    """A process that encodes shards on its device.

    The process loads its encoders while the caller goes on; `wait` returns when it is ready.

    Args:
        plan: encoders, device and settings.
        module: entry point of the process.

    Attributes:
        slots: functions that encode a shard each, as encoder_process.encode_tar. One thread may
            call one at a time. They raise EncoderFailed if the shard could not be encoded, and
            EncoderLost if the process has ended.
    """

    def __init__(self, plan: EncodingPlan, *, module: str = "tasks.encode.encoder_process") -> None:
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # closed with us
        self._ending = threading.Lock()
        with ExitStack() as theirs:
            pairs = [socket.socketpair() for _ in range(SHARDS_PER_DEVICE)]
            numbers = [theirs.enter_context(pair[1]).fileno() for pair in pairs]
            self._child = subprocess.Popen(
                [interpreter(plan.job.runtime), "-P", "-m", module, *map(str, numbers)],
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the closed sockets end it, not Ctrl-C
            )
        self.pid = self._child.pid
        self._connections = [Connection(ours.detach()) for ours, _ in pairs]
        self.slots = [partial(self._encode, connection) for connection in self._connections]
        send(self._connections[0], asdict(plan))

    def wait(self) -> None:
        """Return when the encoders are loaded. Raises WrongInput or EncoderLost."""
        try:
            found = receive(self._connections[0])
        except (EOFError, OSError):
            raise self._lost() from None
        if "error" in found:
            raise WrongInput(found["message"])

    def _encode(self, connection: Connection, tar: str, sha256: str, path: str) -> dict[str, Any]:
        try:
            send(connection, {"tar": tar, "sha256": sha256, "path": path})
            found = receive(connection)
        except (EOFError, OSError):
            raise self._lost() from None
        if "facts" in found:
            return dict(found["facts"])
        raise KNOWN.get(found["error"], EncoderFailed)(found["message"])

    def close(self) -> None:
        """Close the sockets, which ends the process."""
        for connection in self._connections:
            connection.close()

    def join(self, seconds: float = END_SECONDS) -> int:
        """Wait for the process, which `close` ends, and return its exit code.

        Args:
            seconds: it is killed after this time.
        """
        try:
            return self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            self._child.kill()
            return self._child.wait()

    def _lost(self) -> EncoderLost:
        with self._ending:
            code = self.join()
            self._log.seek(0)
            text = self._log.read().strip()
        log.debug("%s", text)
        last = text.rpartition("\n")[2]
        return EncoderLost(f"the encoder process ended with {code}: {last}")
