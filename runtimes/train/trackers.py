"""Experiment trackers for curves and images: TensorBoard always, Weights & Biases on request.

<work>/wandb.json     the W&B run id, reused at each resume
<work>/wandb/...      W&B's files (a remote work folder receives them when the run ends)
<work>/tensorboard/events.out.tfevents.00001     one per start of the run, numbered
"""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import struct
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Protocol

import google_crc32c
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary

from artifacts.filesystems import matching
from artifacts.records import write_atomic
from configs.errors import Refused
from configs.settings.train import Train
from configs.settings.train_parts import Wandb
from runtimes.train.checkpoints import is_unreachable, reason_of

KEY = "WANDB_API_KEY"


def check_wandb(settings: Wandb | None) -> None:
    """Raise Refused if the wandb package or its API key is missing, before training starts."""
    if settings is None:
        return
    if find_spec("wandb") is None:
        raise Refused("train.wandb needs the package wandb, which is not installed here")
    if settings.mode == "online" and not os.environ.get(KEY):
        raise Refused(
            f"train.wandb needs a key in the environment variable {KEY}; or set "
            "train.wandb.mode to offline"
        )


class WandbTracker:
    """Implements Tracker.

    After a resume, W&B itself drops the points of repeated steps.

    Raises:
        Refused: W&B rejects the API key, the project or the entity.
    """

    def __init__(self, settings: Wandb, work: str, config: dict[str, Any]) -> None:
        import wandb  # here, since the import takes a second

        self._fs, root = url_to_fs(work)
        self._root = root.rstrip("/")
        self._local = isinstance(self._fs, LocalFileSystem)
        self._folder = self._root if self._local else tempfile.mkdtemp(prefix="kiln-wandb-")
        self._image = wandb.Image
        try:
            self._run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                mode=settings.mode,
                id=self._run_id(),
                resume="allow",
                dir=self._folder,
                config=config,
                # The stage already logs our output, and our git checkout is not the user's project.
                settings=wandb.Settings(
                    console="off", silent=True, disable_git=True, disable_code=True
                ),
            )
        except Exception as error:
            self._delete_temporary()
            if isinstance(error, wandb.errors.AuthenticationError | wandb.errors.UsageError):
                raise Refused(f"train.wandb: {error}") from None
            raise

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def picture(self, step: int, name: str, png: bytes) -> None:
        self._run.log({name: self._image(Image.open(io.BytesIO(png)))}, step=step)

    def rewind(self, step: int) -> None:
        pass

    def flush(self) -> None:
        pass  # W&B's own process uploads

    def close(self, done: bool) -> None:
        self._run.finish(exit_code=0 if done else 1)
        if not self._local:
            self._fs.put(f"{self._folder}/wandb/", f"{self._root}/wandb/", recursive=True)
            self._delete_temporary()

    def _run_id(self) -> str:
        """The stored W&B run id, or else a new id, which is then stored."""
        path = f"{self._root}/wandb.json"
        if not self._fs.exists(path):
            number = uuid.uuid4().hex[:8]
            write_atomic(self._fs, path, json.dumps({"id": number}).encode())
        return str(json.loads(self._fs.cat_file(path))["id"])

    def _delete_temporary(self) -> None:
        if not self._local:
            shutil.rmtree(self._folder, ignore_errors=True)


log = logging.getLogger("kiln")


class Tracker(Protocol):
    """An experiment tracker."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log scalars at a step, by tag."""

    def picture(self, step: int, name: str, png: bytes) -> None:
        """Log an image (the bytes of a PNG file)."""

    def rewind(self, step: int) -> None:
        """Discard the points after a step, from which the run continues."""

    def flush(self) -> None:
        """Write all logged data to storage. Must be thread-safe."""

    def close(self, done: bool) -> None:
        """Flush and end; `done` is False if the run stopped early."""


class Trackers:
    """All trackers of a run. If a tracker raises, it is dropped with a warning."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = trackers

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Log scalars; None values are omitted."""
        known = {name: value for name, value in values.items() if value is not None}
        self._each(lambda tracker: tracker.scalars(step, known))

    def picture(self, step: int, name: str, png: bytes) -> None:
        """Log an image (the bytes of a PNG file)."""
        self._each(lambda tracker: tracker.picture(step, name, png))

    def rewind(self, step: int) -> None:
        """Discard the points after a step."""
        self._each(lambda tracker: tracker.rewind(step))

    def flush(self) -> None:
        """Write all logged data to storage."""
        self._each(lambda tracker: tracker.flush())

    def close(self, done: bool) -> None:
        """Flush and end all trackers."""
        self._each(lambda tracker: tracker.close(done))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in self._trackers:
            try:
                call(tracker)
            except Exception as error:  # such as a full disk or an unreachable service
                self._trackers = [other for other in self._trackers if other is not tracker]
                name = type(tracker).__name__
                log.warning("%s is given up: %s: %s", name, type(error).__name__, error)


class TensorBoard:
    """Implements Tracker: writes event files in `<work>/tensorboard`.

    Events are appended to a local file. Remote objects cannot be appended to, so each flush writes
    a new object; an object that a store did not accept is written at the next flush. A rewind
    writes a SessionLog.START event: TensorBoard then purges the events of its step and later.
    """

    def __init__(self, work: str) -> None:
        self._fs, root = url_to_fs(work, use_listings_cache=False)
        self._folder = f"{root.rstrip('/')}/tensorboard"
        self._local = isinstance(self._fs, LocalFileSystem)
        self._lock = threading.Lock()
        self._unsent: dict[str, bytes] = {}  # by path
        self._fs.makedirs(self._folder, exist_ok=True)
        paths = matching(self._fs, self._folder, "*tfevents.*")
        names = [path.rpartition(".")[2] for path in paths]
        self._number = max((int(name) for name in names if name.isdigit()), default=0)
        self._begin_file()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        points = [Summary.Value(tag=name, simple_value=v) for name, v in values.items()]
        self._add(Event(step=step, summary=Summary(value=points)))

    def picture(self, step: int, name: str, png: bytes) -> None:
        width, height = struct.unpack(">II", png[16:24])
        image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=png)
        self._add(Event(step=step, summary=Summary(value=[Summary.Value(tag=name, image=image)])))

    def rewind(self, step: int) -> None:
        self._add(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def flush(self) -> None:
        with self._lock:
            if not self._local and self._added:
                self._unsent[self._path] = bytes(self._pending)
                self._begin_file()
        for path, data in list(self._unsent.items()):
            try:
                self._fs.pipe_file(path, data)
            except Exception as error:
                if not is_unreachable(self._fs, error):
                    raise
                log.warning("TensorBoard: %s could not be written: %s", path, reason_of(error))
                return
            self._unsent.pop(path, None)

    def close(self, done: bool) -> None:
        self.flush()

    def _begin_file(self) -> None:
        """Start a file whose name sorts last: TensorBoard reads files in name order."""
        self._number += 1
        self._path = f"{self._folder}/events.out.tfevents.{self._number:05d}"
        begun = Event(wall_time=time.time(), file_version="brain.Event:2")
        self._pending = bytearray(_record(begun))
        self._added = False

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
    """An event in the TFRecord format: length and data, each followed by a masked CRC-32C."""
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    """The masked CRC-32C of TFRecord: rotated right by 15 bits, plus a constant.

    tensorboard's own function, in Python, takes 0.2 s per megabyte of a picture.
    """
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def open_trackers(work: str, settings: Train) -> Trackers:
    """The trackers of a run. Raises Refused if Weights & Biases rejects its settings."""
    trackers: list[Tracker] = [TensorBoard(work)]
    if settings.wandb is not None:
        try:
            config = settings.model_dump(mode="json")
            trackers.append(WandbTracker(settings.wandb, work, config))
        except Refused:
            raise
        except Exception as error:  # such as an unreachable service
            log.warning("Weights & Biases is given up: %s: %s", type(error).__name__, error)
    return Trackers(trackers)
