"""Gather bytes of a run's processes over TCP, for environments without torch.distributed."""

from __future__ import annotations

import hmac
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import IO, cast

from runtimes.process.launcher import Ranks

#: Time limit in seconds for all ranks to connect, and for one gather: longer than a rank needs to
#: write its part of a large checkpoint. launcher.py detects a lost process much earlier.
CONNECT_SECONDS = 300.0
GATHER_SECONDS = 3600.0
#: Size of the key, which a rank sends at once, and the time limit in seconds for its arrival.
KEY_BYTES = 16
KEY_SECONDS = 10.0
LOOPBACK = "127.0.0.1"


class SocketWriters:
    """Implements contract.Writers: every rank has a connection to rank 0, for one thread.

    Args:
        ranks: this process and the number of processes.
        address: rank 0's host, as the other ranks reach it.
        broadcast: returns rank 0's integer below 2^32 on all ranks; collective.

    Raises:
        OSError: a rank did not connect in time.
    """

    def __init__(self, ranks: Ranks, address: str, broadcast: Callable[[int], int]) -> None:
        self.rank = ranks.rank
        self.world = ranks.world
        # All interfaces: a host's own name can resolve to a loopback address.
        bind = LOOPBACK if address == LOOPBACK else ""
        server = socket.create_server((bind, 0), backlog=ranks.world) if ranks.first else None
        port = broadcast(server.getsockname()[1] if server else 0)
        words = [broadcast(secrets.randbits(32)) for _ in range(KEY_BYTES // 4)]
        key = b"".join(word.to_bytes(4, "big") for word in words)
        if server is None:
            self._streams = [self._connect(address, port, key)]
        else:
            with server:
                self._streams = self._accept(server, key)

    def _connect(self, address: str, port: int, key: bytes) -> IO[bytes]:
        stream = _stream(socket.create_connection((address, port), CONNECT_SECONDS))
        stream.write(key + self.rank.to_bytes(4, "big"))
        stream.flush()
        return stream

    def _accept(self, server: socket.socket, key: bytes) -> list[IO[bytes]]:
        """The streams of ranks 1, 2, ...; a stranger's connection is closed."""
        server.settimeout(CONNECT_SECONDS)
        streams: dict[int, IO[bytes]] = {}
        while len(streams) < self.world - 1:
            connection = server.accept()[0]
            stream = _stream(connection)
            greeting = b""
            connection.settimeout(KEY_SECONDS)
            with suppress(OSError):  # a stranger sends nothing, or resets its connection
                greeting = stream.read(KEY_BYTES + 4)
            connection.settimeout(GATHER_SECONDS)
            if hmac.compare_digest(greeting[:KEY_BYTES], key):
                streams[int.from_bytes(greeting[KEY_BYTES:], "big")] = stream
            else:
                stream.close()
        return [streams[rank] for rank in range(1, self.world)]

    def gather(self, data: bytes) -> list[bytes]:
        """The data of every rank, by rank. Collective.

        Raises:
            OSError: a rank is lost.
        """
        if self.rank:
            _send(self._streams[0], data)
            return [_receive(self._streams[0]) for _ in range(self.world)]
        parts = [data, *(_receive(stream) for stream in self._streams)]
        for stream in self._streams:
            for part in parts:
                _send(stream, part)
        return parts


def _stream(connection: socket.socket) -> IO[bytes]:
    connection.settimeout(GATHER_SECONDS)
    stream = cast(IO[bytes], connection.makefile("rwb"))
    connection.close()  # when the stream is closed
    return stream


def _send(stream: IO[bytes], data: bytes) -> None:
    stream.write(len(data).to_bytes(8, "big") + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> bytes:
    return _read(stream, int.from_bytes(_read(stream, 8), "big"))


def _read(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise ConnectionResetError("another process of the run has closed its connection")
    return data
