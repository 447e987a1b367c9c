"""Client of an encoder process that runs in another runtime's Python environment."""

from __future__ import annotations

import logging
import socket
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtimes.contract import WrongInput
from runtimes.encoder_server import Arrays, receive, send
from runtimes.process.job import EncodeJob
from runtimes.registry import interpreter

END_SECONDS = 10.0
log = logging.getLogger("kiln")


class EncoderLost(RuntimeError):
    """The encoder process has ended; the message has the last line of its log."""


class ServedEncoder:
    """Implements contract.PipelineEncoder by requests to a process; thread-safe.

    Raises:
        WrongInput: the model or the device is unusable.
        EncoderLost: the process ended; any method may raise it.
    """

    def __init__(self, job: EncodeJob) -> None:
        self._lock = threading.Lock()
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # closed with us
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            self._child = subprocess.Popen(
                [interpreter(job.runtime), "-P", "-m", "runtimes", "--encode", str(number)],
                pass_fds=(number,),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the closed socket ends it, not Ctrl-C
            )
        self._connection = Connection(ours.detach())
        facts, _ = self._request(asdict(job))
        if "wrong_input" in facts:
            raise WrongInput(facts["wrong_input"])
        self.info: dict[str, Any] = facts["info"]

    def images(self, pixels: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[Any]]:
        _, found = self._request({"call": "images"}, {"pixels": pixels})
        return found["mean"], found["logvar"]

    def texts(self, captions: Sequence[str]) -> tuple[NDArray[Any], NDArray[Any] | None]:
        _, found = self._request({"call": "texts", "captions": list(captions)})
        return found["states"], found.get("pooled")

    def input_ids(self, captions: Sequence[str]) -> NDArray[np.int64]:
        return self._request({"call": "input_ids", "captions": list(captions)})[1]["ids"]

    def token_counts(self, captions: Sequence[str]) -> list[int]:
        facts, _ = self._request({"call": "token_counts", "captions": list(captions)})
        return list(facts["counts"])

    def __del__(self) -> None:
        """End the process by closing its socket."""
        if hasattr(self, "_connection"):
            self._end()

    def _end(self) -> int:
        """Close the socket, wait for the process and return its exit code."""
        self._connection.close()
        try:
            return self._child.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            return self._child.wait()

    def _request(
        self, facts: dict[str, Any], arrays: Arrays | None = None
    ) -> tuple[dict[str, Any], Arrays]:
        with self._lock:
            try:
                if self._connection.closed:  # an earlier call lost the process
                    raise EOFError
                send(self._connection, facts, arrays)
                return receive(self._connection)
            except (EOFError, OSError):
                code = self._end()
                self._log.seek(0)
                text = self._log.read().strip()
                log.debug("%s", text)
                last = text.rpartition("\n")[2]
                raise EncoderLost(f"the encoder process ended with {code}: {last}") from None
