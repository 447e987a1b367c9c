"""Encoders: a process for each accelerator of a machine, its client, and encoders in the store.

`python -P -m tasks.encode.encoder_processes` is a process that encodes shards on one device.
Requests and answers are JSON on a socket: paths of shards, never pixels or latents. So the process
may run in another Python environment, and several processes share no interpreter lock.

Remote workers of a pipeline fetch its encoders from the store.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from runtimes.pipeline_folder.folder import TEXT_PARTS, Base
from runtimes.process.job import EncodeJob
from runtimes.process.launcher import count_cores
from runtimes.registry import encoder_devices, encodes_in_subprocess, interpreter, open_encoder
from tasks.build_or_reuse import storing
from tasks.child_process import ConnectedProcess, ProcessLost
from tasks.encode.crop_to_bucket import TransformSettings
from tasks.encode.shard import ShardEncoder

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
        arguments = (encoder, self.settings, job.batch_size, self.decoders)
        return ShardEncoder(*arguments, embeds=job.embeds)


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
    message = receive(connections[0])
    job = EncodeJob(**message.pop("job"))
    settings = TransformSettings(**message.pop("settings"))
    try:
        encoder = EncodingPlan(job, settings, **message).open()
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
        answer = {"facts": encode_tar(encoder, **request)}
    except Exception as error:  # the client raises it
        answer = _described(error)
    send(connection, answer)


def _described(error: Exception) -> dict[str, Any]:
    known = type(error).__name__
    if known in KNOWN:
        return {"error": known, "message": str(error)}
    traceback.print_exception(error)
    return {"error": None, "message": f"{type(error).__name__}: {error}"}


class EncoderProcess:
    """A process that encodes shards on its device.

    The process loads its encoders while the caller goes on; `wait` returns when it is ready.

    Args:
        plan: encoders, device and settings.
        module: entry point of the process.

    Attributes:
        slots: functions that encode a shard each, as `encode_tar`. One thread may
            call a slot at a time. They raise Failed if the shard could not be encoded, and
            ProcessLost if the process has ended.
    """

    def __init__(
        self, plan: EncodingPlan, *, module: str = "tasks.encode.encoder_processes"
    ) -> None:
        python = interpreter(plan.job.runtime)
        self.process = process = ConnectedProcess(
            "the encoder process", module, python=python, sockets=SHARDS_PER_DEVICE
        )
        self.slots = [partial(_encode_by, process, n) for n in range(SHARDS_PER_DEVICE)]
        process.send(json.dumps(asdict(plan)).encode())

    def wait(self) -> None:
        """Return when the encoders are loaded. Raises Refused or ProcessLost."""
        answer = json.loads(self.process.receive())
        if "error" in answer:
            raise Refused(answer["message"])


def _encode_by(
    process: ConnectedProcess, number: int, tar: str, sha256: str, path: str
) -> dict[str, Any]:
    request = {"tar": tar, "sha256": sha256, "path": path}
    answer = json.loads(process.ask(json.dumps(request).encode(), number))
    if "facts" in answer:
        return dict(answer["facts"])
    raise KNOWN.get(answer["error"], Failed)(answer["message"])


class EncoderPool:
    """Encodes shards on all devices of this machine; thread-safe.

    One device needs no process of its own, unless its runtime has another environment or locks it.
    The processes end with this object: the next stage needs their devices.

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
        devices = encoder_devices(plan.job, processes)
        self.devices = count = len(devices)
        if count == 1 and not encodes_in_subprocess(plan.job):
            encoder = plan.on(devices[0], count).open()
            slots = [partial(encode_tar, encoder)] * SHARDS_PER_DEVICE
        else:
            processes_of_devices = [start(plan.on(device, count)) for device in devices]
            for process in processes_of_devices:
                process.wait()
            of_devices = (process.slots for process in processes_of_devices)
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
            ProcessLost: the device's process has ended.
        """
        slot = self._free.get()
        stays = True
        try:
            return slot(tar, sha256, path)
        except ProcessLost:
            with self._lock:
                self._slots -= 1
                stays = self._slots <= 0  # the last slot: a thread that waits for it gets its error
            raise
        finally:
            if stays:
                self._free.put(slot)


PIPELINE = "pipeline"
VAE = "vae"  # subfolders of the copy


@dataclass(frozen=True)
class EncodersInStore:
    """Where the encoders of a job are, for workers without the flow's folders."""

    url: str
    digest: str  # of digest_encoders

    def fetched(self, job: EncodeJob) -> EncodeJob:
        """The job with the folders of this machine's copy. Raises Refused."""
        copy = fetch_model(self.url, self.digest, lambda folder: _opened(folder).digest_encoders())
        return replace(job, **_opened(copy).job_fields)


def put_encoders(store: Store, base: Base) -> EncodersInStore:
    """Copy the VAE and the text encoders to the store, unless they are there."""
    digest = base.digest_encoders()
    return EncodersInStore(put_model(store, digest, dict(_files(base))), digest)


def _files(base: Base) -> Iterator[tuple[str, Path]]:
    """(path in the copy, file) of all files that an encoder reads."""
    for name in ("model_index.json", f"{base.family.denoiser}/config.json"):
        yield f"{PIPELINE}/{name}", base.folder / name
    for part in TEXT_PARTS:
        yield from _below(base.part(part), f"{PIPELINE}/{part}")
    yield from _below(base.vae, f"{PIPELINE}/vae" if base.vae_folder is None else VAE)


def _below(folder: Path, name: str) -> Iterator[tuple[str, Path]]:
    for file in files_below(folder):
        relative = file.relative_to(folder)
        if not IGNORED & set(relative.parts):
            yield f"{name}/{relative.as_posix()}", file


def _opened(copy: Path) -> Base:
    vae = copy / VAE
    return Base.open(copy / PIPELINE, vae if vae.is_dir() else None)


if __name__ == "__main__":
    serve([int(number) for number in sys.argv[1:]])
