"""Encoders in a process of their own, for those who run in another environment: calls come in, and
arrays go out, over a socket.

A message is two frames: JSON, and a safetensors file with the arrays (of every NumPy, old or new).
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
    """Send one message."""
    whole = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
    frames = (json.dumps(facts).encode(), save(whole))  # both are fit to be sent, or none is
    for frame in frames:
        connection.send_bytes(frame)


def receive(connection: Connection) -> tuple[dict[str, Any], Arrays]:
    """The next message. Raises EOFError once the other side is gone."""
    facts = json.loads(connection.recv_bytes())
    return dict(facts), load(connection.recv_bytes())


def serve(descriptor: int) -> None:
    """Open the encoders that the first message names, then answer until the socket ends."""
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
