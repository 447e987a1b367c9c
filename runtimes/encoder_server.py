"""Serve encoders over a socket to a process in another Python environment.

A message is two frames: JSON, then a safetensors file with the arrays. Both sides can read
safetensors whatever their NumPy versions are; pickled arrays would need compatible versions.
"""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from runtimes.contract import PipelineEncoder, WrongInput
from runtimes.process.job import EncodeJob
from runtimes.registry import open_encoder

Arrays = dict[str, NDArray[Any]]


def send(connection: Connection, facts: dict[str, Any], arrays: Arrays | None = None) -> None:
    """Send one message: the JSON object `facts` and named arrays."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
    # Both frames are serialized before the first is sent: an error must not leave half a message.
    frames = (json.dumps(facts).encode(), save(contiguous))
    for frame in frames:
        connection.send_bytes(frame)


def receive(connection: Connection) -> tuple[dict[str, Any], Arrays]:
    """Receive one message. Raises EOFError when the peer has closed the socket."""
    facts = json.loads(connection.recv_bytes())
    return dict(facts), load(connection.recv_bytes())


def serve(descriptor: int) -> None:
    """Open the encoders of the first message (an EncodeJob), then answer calls.

    The server returns when the peer closes the socket.

    Args:
        descriptor: file descriptor of the connected socket.
    """
    with Connection(descriptor) as connection:
        try:
            encoder = open_encoder(EncodeJob(**receive(connection)[0]))
        except WrongInput as error:
            send(connection, {"wrong_input": str(error)})
            return
        send(connection, {"info": encoder.info})
        while True:
            try:
                facts, arrays = receive(connection)
            except EOFError:
                return
            send(connection, *_answer(encoder, facts, arrays))


def _answer(
    encoder: PipelineEncoder, facts: dict[str, Any], arrays: Arrays
) -> tuple[dict[str, Any], Arrays]:
    call = facts["call"]
    if call == "images":
        mean, logvar = encoder.images(arrays["pixels"])
        return {}, {"mean": mean, "logvar": logvar}
    captions = facts["captions"]
    if call == "texts":
        states, pooled = encoder.texts(captions)
        return {}, {"states": states} | ({} if pooled is None else {"pooled": pooled})
    if call == "input_ids":
        return {}, {"ids": encoder.input_ids(captions)}
    return {"counts": encoder.token_counts(captions)}, {}
