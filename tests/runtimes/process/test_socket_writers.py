"""Ranks without torch.distributed gather over TCP what each has written."""

import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes.optimizer_state import owned_copies, shapes_of
from runtimes.process import socket_writers
from runtimes.process.launcher import Ranks
from runtimes.process.socket_writers import LOOPBACK, SocketWriters
from runtimes.train.checkpoints import Checkpoints


class Broadcasts:
    """Rank 0's numbers on all threads, as the collectives of a runtime."""

    def __init__(self, world: int) -> None:
        self._barrier, self._number = threading.Barrier(world), 0

    def of(self, rank: int) -> Callable[[int], int]:
        def broadcast(number: int) -> int:
            assert 0 <= number < 2**32
            if rank == 0:
                self._number = number
            self._barrier.wait(20)
            found = self._number
            self._barrier.wait(20)
            return found

        return broadcast


def by_ranks(world: int, work: Callable[[SocketWriters], Any]) -> list[Any]:
    """The result of `work` on each rank."""
    broadcasts = Broadcasts(world)

    def run(rank: int) -> Any:
        return work(SocketWriters(Ranks(rank, world), LOOPBACK, broadcasts.of(rank)))

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world)))


def test_every_rank_gets_the_data_of_all() -> None:
    sizes = (0, 1, 2**20)

    def gather(writers: SocketWriters) -> list[list[bytes]]:
        return [writers.gather(bytes([writers.rank]) * size) for size in sizes]

    expected = [[bytes([rank]) * size for rank in range(3)] for size in sizes]
    assert by_ranks(3, gather) == [expected] * 3


def test_each_rank_writes_its_part_of_a_checkpoint(tmp_path: Path) -> None:
    state = {"weights": {str(n): np.full(25, n, np.float32) for n in range(8)}}
    shapes, parts = shapes_of(state), dict[int, set[str]]()

    def save(writers: SocketWriters) -> None:
        checkpoints = Checkpoints(str(tmp_path), 2, shard_bytes=100, writers=writers)
        own = owned_copies(state, checkpoints.owners(shapes), writers.rank, np.array)
        parts[writers.rank] = set(own["weights"])
        checkpoints.save(1, own, ["{}"], {}, shapes=shapes)

    by_ranks(2, save)
    assert parts[0] & parts[1] == set() and len(parts[0]) == len(parts[1]) == 4
    latest = Checkpoints(str(tmp_path), 2).latest()
    assert latest is not None
    np.testing.assert_equal(latest.state, state)


def test_a_lost_rank_is_an_error_on_the_others() -> None:
    def gather(writers: SocketWriters) -> Any:
        if writers.rank == 1:
            return writers._streams[0].close()
        with pytest.raises(ConnectionError):
            writers.gather(b"")
        for stream in writers._streams:
            stream.close()

    by_ranks(3, gather)


def wrong_key(stranger: socket.socket) -> None:
    stranger.sendall(b"x" * (socket_writers.KEY_BYTES + 4))


def reset(stranger: socket.socket) -> None:
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stranger.close()


def silence(stranger: socket.socket) -> None:
    pass


@pytest.mark.parametrize("behave", [wrong_key, reset, silence])
def test_a_stranger_s_connection_is_closed(
    behave: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, strangers = socket.create_connection, list[socket.socket]()

    def second(address: tuple[str, int], *timeout: float) -> socket.socket:
        strangers.append(connect(address))
        behave(strangers[-1])
        return connect(address, *timeout)

    monkeypatch.setattr(socket, "create_connection", second)
    monkeypatch.setattr(socket_writers, "KEY_SECONDS", 0.2)
    assert by_ranks(2, lambda writers: writers.gather(b"a")) == [[b"a", b"a"]] * 2
    for stranger in strangers:
        stranger.close()
