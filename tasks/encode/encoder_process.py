"""A process that encodes shards on one device: `python -P -m tasks.encode.encoder_process`.

Requests and answers are JSON on a socket: paths of shards, never pixels or latents. So the process
may run in another Python environment, and several processes share no interpreter lock.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from artifacts.image_shards import read_tar
from artifacts.records import Damaged
from artifacts.store import Store
from runtimes.contract import WrongInput
from runtimes.process.job import EncodeJob
from runtimes.process.launcher import count_cores
from runtimes.registry import open_encoder
from tasks.build_or_reuse import MachineShort, StorageAway, StorageError, storing
from tasks.encode.decode_and_crop import TransformSettings
from tasks.encode.encode_shard import ShardEncoder

#: Shards that a device process works on: one on the device, others being read and written.
SHARDS_PER_DEVICE = 2
#: Errors that the client raises again.
KNOWN = {
    kind.__name__: kind for kind in (WrongInput, Damaged, MachineShort, StorageAway, StorageError)
}


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
        """Load the encoders in this process. Raises WrongInput."""
        job, encoder = self.job, open_encoder(self.job)
        given = (encoder, self.settings, job.batch_size, self.decoders)
        return ShardEncoder(*given, embeds=job.embeds)


def encode_tar(encoder: ShardEncoder, tar: str, sha256: str, path: str) -> dict[str, Any]:
    """Encode the image shard at URL `tar` to a latent shard at `path`; return its facts.

    Raises:
        Damaged: the tar has another sha256.
        StorageError: its store refuses requests; StorageAway if that may pass.
        WrongInput: see ShardEncoder.encode.
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
    job, settings = EncodeJob(**found.pop("job")), TransformSettings(**found.pop("settings"))
    try:
        encoder = EncodingPlan(job, settings, **found).open()
    except WrongInput as error:
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


if __name__ == "__main__":
    serve([int(number) for number in sys.argv[1:]])
