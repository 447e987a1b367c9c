"""Encoders: a process for each accelerator of a machine, its client, and encoders in the store.

`python -P -m tasks.encode.encoders` is a process that encodes shards on one device. Requests and
answers are JSON on a socket: paths of shards, never pixels or latents. So the process may run in
another Python environment, and several processes share no interpreter lock.

Remote workers of a pipeline fetch its encoders from the store.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from artifacts.image_shards import read_tar
from artifacts.models import IGNORED, fetch_model, files_below, put_model
from artifacts.records import Damaged
from artifacts.store import Store
from configs.errors import Away, Failed, Refused
from runtimes.families import detect_family
from runtimes.pipeline_folder.folder import TEXT_PARTS, digest_encoders, vae_path
from runtimes.process.job import EncodeJob
from runtimes.process.launcher import count_cores
from runtimes.registry import encoder_devices, encodes_in_subprocess, interpreter, open_encoder
from tasks.encode.shard import ShardEncoder
from tasks.encode.transform import TransformSettings
from tasks.stage import storing

#: Shards that a device process works on: one on the device, others being read and written.
SHARDS_PER_DEVICE = 2
#: Errors that the client raises again.
KNOWN = {kind.__name__: kind for kind in (Refused, Damaged, Away, Failed)}


@dataclass(frozen=True)
class EncodingPlan:
    """What an encoder process needs to know before its first shard."""

    job: EncodeJob
    settings: TransformSettings
    decoders: int = 1  # threads that decode pictures, per device

    def on(self, device: str, processes: int) -> EncodingPlan:
        """The plan of one of several processes of this machine."""
        decoders = max(1, count_cores() // processes)
        return replace(self, job=replace(self.job, device=device), decoders=decoders)

    def open(self) -> ShardEncoder:
        """Load the encoders in this process. Raises Refused."""
        job = self.job
        encoder = open_encoder(self.job)
        given = (encoder, self.settings, job.batch_size, self.decoders)
        return ShardEncoder(*given, embeds=job.embeds)


def encode_tar(encoder: ShardEncoder, tar: str, sha256: str, path: str) -> dict[str, Any]:
    """Encode the image shard at URL `tar` to a latent shard at `path`; return its facts.

    Raises:
        Damaged: the tar has another sha256.
        Failed: its store refuses requests; Away if that may pass.
        Refused: see ShardEncoder.encode.
    """
    with storing(Store(tar.rpartition("/")[0])):
        return encoder.encode(read_tar(tar, sha256), Path(path))


def send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> dict[str, Any]:
    """Raises EOFError when the peer has closed the socket."""
    return dict(json.loads(connection.recv_bytes()))


def serve(descriptors: Sequence[int]) -> None:
    """Open the encoders of the first message (an EncodingPlan), then encode shard after shard.

    The process ends when the peer closes a socket, even while it encodes.

    Args:
        descriptors: file descriptors of connected sockets, one per shard in progress. The first
            receives the plan.
    """
    connections = [Connection(descriptor) for descriptor in descriptors]
    found = receive(connections[0])
    job = EncodeJob(**found.pop("job"))
    settings = TransformSettings(**found.pop("settings"))
    try:
        encoder = EncodingPlan(job, settings, **found).open()
    except Refused as error:
        send(connections[0], _described(error))
        return
    send(connections[0], {})
    with ThreadPoolExecutor(len(connections)) as threads:
        while True:
            for connection in wait(connections):
                assert isinstance(connection, Connection)
                try:
                    request = receive(connection)
                except (EOFError, OSError):
                    os._exit(0)  # nobody wants the shards in progress
                threads.submit(_answer, connection, encoder, request)


def _answer(connection: Connection, encoder: ShardEncoder, request: dict[str, Any]) -> None:
    try:
        found = {"facts": encode_tar(encoder, **request)}
    except Exception as error:  # the client raises it
        found = _described(error)
    send(connection, found)


def _described(error: Exception) -> dict[str, Any]:
    known = type(error).__name__
    if known in KNOWN:
        return {"error": known, "message": str(error)}
    traceback.print_exception(error)
    return {"error": None, "message": f"{type(error).__name__}: {error}"}


END_SECONDS = 10.0
log = logging.getLogger("kiln")


class EncoderLost(Away):
    """The encoder process has ended; the message has the last line of its log."""


class EncoderProcess:
    """A process that encodes shards on its device.

    The process loads its encoders while the caller goes on; `wait` returns when it is ready.

    Args:
        plan: encoders, device and settings.
        module: entry point of the process.

    Attributes:
        slots: functions that encode a shard each, as `encode_tar`. One thread may
            call one at a time. They raise Failed if the shard could not be encoded, and
            EncoderLost if the process has ended.
    """

    def __init__(self, plan: EncodingPlan, *, module: str = "tasks.encode.encoders") -> None:
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
        """Return when the encoders are loaded. Raises Refused or EncoderLost."""
        try:
            found = receive(self._connections[0])
        except (EOFError, OSError):
            raise self._lost() from None
        if "error" in found:
            raise Refused(found["message"])

    def _encode(self, connection: Connection, tar: str, sha256: str, path: str) -> dict[str, Any]:
        try:
            send(connection, {"tar": tar, "sha256": sha256, "path": path})
            found = receive(connection)
        except (EOFError, OSError):
            raise self._lost() from None
        if "facts" in found:
            return dict(found["facts"])
        raise KNOWN.get(found["error"], Failed)(found["message"])

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


class EncoderPool:
    """Encodes shards on all devices of this machine; thread-safe.

    One device needs no process of its own, unless its runtime has another environment or locks it.

    Args:
        plan: encoders and settings; its device may be a kind of devices, such as `cuda`.
        processes: see encoder_devices.
        start: starts an encoder process.

    Attributes:
        devices: their number.

    Raises:
        Refused: the model or a device is unusable.
    """

    def __init__(
        self,
        plan: EncodingPlan,
        processes: int | None = None,
        start: Callable[..., EncoderProcess] = EncoderProcess,
    ) -> None:
        self._processes: list[EncoderProcess] = []
        devices = encoder_devices(plan.job, processes)
        self.devices = count = len(devices)
        if count == 1 and not encodes_in_subprocess(plan.job):
            encoder = plan.on(devices[0], count).open()
            slots = [partial(encode_tar, encoder)] * SHARDS_PER_DEVICE
        else:
            for device in devices:
                self._processes.append(start(plan.on(device, count)))
            for process in self._processes:
                process.wait()
            of_devices = (process.slots for process in self._processes)
            # First one slot of each device: few shards use all devices.
            slots = [slot for row in zip(*of_devices, strict=True) for slot in row]
        self._free: SimpleQueue[Callable[..., dict[str, Any]]] = SimpleQueue()
        for slot in slots:
            self._free.put(slot)
        self._slots = len(slots)
        self._lock = threading.Lock()

    def encode(self, tar: str, sha256: str, path: str) -> dict[str, Any]:
        """Encode a shard on a free device, as `encode_tar`.

        Raises:
            Failed: the shard could not be encoded.
            EncoderLost: the device's process has ended.
        """
        slot = self._free.get()
        stays = True
        try:
            return slot(tar, sha256, path)
        except EncoderLost:
            with self._lock:
                self._slots -= 1
                stays = self._slots <= 0  # the last one: who waits for a slot gets its error
            raise
        finally:
            if stays:
                self._free.put(slot)

    def __del__(self) -> None:
        """End the processes and wait for them: the next stage needs their devices."""
        for process in self._processes:
            process.close()
        for process in self._processes:
            process.join()


PIPELINE = "pipeline"
VAE = "vae"  # subfolders of the copy


@dataclass(frozen=True)
class EncodersInStore:
    """Where the encoders of a job are, for workers without the flow's folders."""

    url: str
    digest: str  # of digest_encoders

    def fetched(self, job: EncodeJob) -> EncodeJob:
        """The job with the folders of this machine's copy. Raises Refused."""
        model, vae = _folders(fetch_model(self.url, self.digest, _digest))
        return replace(job, model=str(model), vae=None if vae is None else str(vae))


def put_encoders(store: Store, model_folder: Path, vae_folder: Path | None) -> EncodersInStore:
    """Copy the VAE and the text encoders to the store, unless they are there."""
    digest = digest_encoders(model_folder, vae_folder)
    files = dict(_files(model_folder, vae_folder))
    return EncodersInStore(put_model(store, digest, files), digest)


def _files(model_folder: Path, vae_folder: Path | None) -> Iterator[tuple[str, Path]]:
    """(path in the copy, file) of all files that an encoder reads."""
    parts = TEXT_PARTS if vae_folder is not None else (*TEXT_PARTS, "vae")
    denoiser = detect_family(model_folder).denoiser
    for name in ("model_index.json", f"{denoiser}/config.json"):
        yield f"{PIPELINE}/{name}", model_folder / name
    for part in parts:
        yield from _below(model_folder / part, f"{PIPELINE}/{part}")
    if vae_folder is not None:
        yield from _below(vae_path(model_folder, vae_folder), VAE)


def _below(folder: Path, name: str) -> Iterator[tuple[str, Path]]:
    for file in files_below(folder):
        relative = file.relative_to(folder)
        if not IGNORED & set(relative.parts):
            yield f"{name}/{relative.as_posix()}", file


def _folders(copy: Path) -> tuple[Path, Path | None]:
    vae = copy / VAE
    return copy / PIPELINE, vae if vae.is_dir() else None


def _digest(copy: Path) -> str:
    return digest_encoders(*_folders(copy))


if __name__ == "__main__":
    serve([int(number) for number in sys.argv[1:]])
