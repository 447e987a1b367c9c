"""A pseudo-terminal for programs under test, with its output."""

import fcntl
import os
import pty
import re
import struct
import termios
import threading
from collections.abc import Callable

from waiting import wait_until


class Terminal:
    """A pseudo-terminal of 40 rows and 160 columns.

    Attributes:
        end: file descriptor for the input and output of the program.
    """

    def __init__(self) -> None:
        self._ours, self.end = pty.openpty()
        fcntl.ioctl(self.end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
        self._seen = bytearray()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        while True:
            try:
                found = os.read(self._ours, 65536)
            except OSError:  # the other end is closed
                return
            if not found:
                return
            self._seen += found

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    @property
    def seen(self) -> str:
        """The output so far, with control sequences."""
        return bytes(self._seen).decode(errors="replace").replace("\r\n", "\n")

    @property
    def text(self) -> str:
        """The output so far, without control sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.seen)

    def wait(self, pattern: str, alive: Callable[[], bool], seconds: float) -> None:
        """Wait until the text matches a pattern."""
        wait_until(
            lambda: re.search(pattern, self.text),
            seconds,
            alive=alive,
            says=lambda: self.text[-3000:],
        )

    def __enter__(self) -> "Terminal":
        return self

    def close(self) -> None:
        """Read the remaining output, and close the terminal."""
        if self.end >= 0:
            os.close(self.end)
            self.end = -1
            self._reading.join(60)
            os.close(self._ours)

    def __exit__(self, *_: object) -> None:
        self.close()
