"""Where a run's curves and pictures are shown: TensorBoard always, others if they are asked for.

<work>/tensorboard/events.out.tfevents.00001     one more each time that the run is started
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import google_crc32c
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary

from configs.training import Train
from runtimes.contract import WrongInput
from runtimes.train.wandb_board import WandbBoard

log = logging.getLogger("kiln")
Scalars = Mapping[str, float | None]


class Board(Protocol):
    """Somebody who shows curves and pictures."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Points of curves."""

    def picture(self, step: int, name: str, png: bytes) -> None:
        """A picture."""

    def rewind(self, step: int) -> None:
        """Forget what came after a step: the run goes on from there."""

    def flush(self) -> None:
        """Have all of it kept. It may be called from another thread."""

    def close(self, done: bool) -> None:
        """Have all of it kept, and end; `done` says whether the run has."""


class Boards:
    """All of a run's boards. One that fails is closed with a warning, and costs no step."""

    def __init__(self, boards: list[Board]) -> None:
        self._boards = boards

    def scalars(self, step: int, values: Scalars) -> None:
        """Points of curves; those not known (None) are left out."""
        known = {name: value for name, value in values.items() if value is not None}
        self._each(lambda board: board.scalars(step, known))

    def picture(self, step: int, name: str, png: bytes) -> None:
        """A picture."""
        self._each(lambda board: board.picture(step, name, png))

    def rewind(self, step: int) -> None:
        """Forget what came after a step."""
        self._each(lambda board: board.rewind(step))

    def flush(self) -> None:
        """Have all of it kept."""
        self._each(lambda board: board.flush())

    def close(self, done: bool) -> None:
        """Have all of it kept, and end."""
        self._each(lambda board: board.close(done))

    def _each(self, do: Callable[[Board], None]) -> None:
        for board in self._boards:
            try:
                do(board)
            except Exception as error:  # a full disk, say, or a service that is gone
                self._boards = [other for other in self._boards if other is not board]
                name = type(board).__name__
                log.warning("%s is given up: %s: %s", name, type(error).__name__, error)


class TensorBoard:
    """Writes event files in `<work>/tensorboard`.

    A local file grows with each event. Elsewhere, where files cannot grow, each flush makes one.
    That a run goes on from an earlier step is told as TensorBoard's readers know it: by a session's
    start, from whose step on they forget what they have read.
    """

    def __init__(self, work: str) -> None:
        self._fs, root = url_to_fs(work)
        self._folder = f"{root.rstrip('/')}/tensorboard"
        self._local = isinstance(self._fs, LocalFileSystem)
        self._lock = threading.Lock()
        self._fs.makedirs(self._folder, exist_ok=True)
        names = [path.rpartition(".")[2] for path in self._fs.glob(f"{self._folder}/*tfevents.*")]
        self._number = max((int(name) for name in names if name.isdigit()), default=0)
        self._begin_file()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """See Board."""
        points = [Summary.Value(tag=name, simple_value=v) for name, v in values.items()]
        self._add(Event(step=step, summary=Summary(value=points)))

    def picture(self, step: int, name: str, png: bytes) -> None:
        """See Board."""
        width, height = struct.unpack(">II", png[16:24])
        image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=png)
        self._add(Event(step=step, summary=Summary(value=[Summary.Value(tag=name, image=image)])))

    def rewind(self, step: int) -> None:
        """See Board."""
        self._add(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def flush(self) -> None:
        """See Board."""
        with self._lock:
            if self._local or not self._added:
                return
            path, data = self._path, bytes(self._pending)
            self._begin_file()
        self._fs.pipe_file(path, data)

    def close(self, done: bool) -> None:
        """See Board."""
        self.flush()

    def _begin_file(self) -> None:
        """Begin a file that sorts after all others: they are read in that order."""
        self._number += 1
        self._path = f"{self._folder}/events.out.tfevents.{self._number:05d}"
        begun = Event(wall_time=time.time(), file_version="brain.Event:2")
        self._pending, self._added = bytearray(_record(begun)), False

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        with self._lock:
            self._pending += _record(event)
            self._added = True
            if self._local:
                with open(self._path, "ab") as stream:
                    stream.write(self._pending)
                self._pending.clear()


def _record(event: Event) -> bytes:
    """An event as TensorFlow's record files have it: length and data, each with a checksum."""
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    """CRC-32C, masked."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def open_boards(work: str, settings: Train) -> Boards:
    """Those that a run has. Raises WrongInput if one does not take what the settings say of it."""
    boards: list[Board] = [TensorBoard(work)]
    if settings.wandb is not None:
        try:
            config = settings.model_dump(mode="json")
            boards.append(WandbBoard(settings.wandb, work, config))
        except WrongInput:
            raise
        except Exception as error:  # the service is not to be reached, say
            log.warning("Weights & Biases is given up: %s: %s", type(error).__name__, error)
    return Boards(boards)
