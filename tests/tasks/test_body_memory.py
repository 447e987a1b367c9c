"""The memory of bodies: bounded for a process, given in order, and held by none that waits."""

import asyncio
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from fetching import fetcher_of
from picture_server import picture
from web_sites import reply, serving

from tasks.download.fetch_with_retries import Fetcher, run, shared
from tasks.download.http import BodyMemory, FetchFailed, Room
from tasks.download.politeness import AsyncClock
from tasks.download.rows import Row

pytestmark = pytest.mark.usefixtures("own_cache")


def test_bodies_wait_for_memory_in_their_order() -> None:
    async def bodies() -> list[int]:
        memory, most, order = BodyMemory(100), [0], list[int]()

        async def body(number: int, size: int) -> None:
            with Room(memory) as room:
                await room.reserve(size)
                order.append(number)
                most.append(memory.used)
                await asyncio.sleep(0)

        sizes = (60, 60, 10, 500, 40, 40)
        await asyncio.gather(*(body(number, size) for number, size in enumerate(sizes)))
        assert memory.used == 0
        assert sorted(most)[-2] <= 100 and max(most) == 500  # a larger one is alone
        return order

    assert run(bodies()) == list(range(6))


def test_a_row_that_waits_for_a_retry_reserves_no_memory() -> None:
    """Otherwise rows that failed keep the memory that the others wait for."""
    memory, used = BodyMemory(1000), list[int]()

    async def sleep(_: float) -> None:
        used.append(memory.used)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        reply(handler, body=picture(0), Content_Length="900")

    async def fetched(fetcher: Fetcher) -> None:
        async with fetcher:
            with Room(memory) as room, pytest.raises(FetchFailed, match="connection broken"):
                await fetcher.get(Row("cut-off", ("",)), room)

    with serving(answer) as host:
        run(fetched(fetcher_of(host, AsyncClock(sleep=sleep))))
    assert used == [0, 0]


def test_bodies_of_unknown_size_and_files_reserve_what_they_read(tmp_path: Path) -> None:
    """Of larger bodies than expected one is read at a time, so that they do not wait in a ring."""
    size, limit, largest = 50_000, 100_000, 60_000
    memory, most = BodyMemory(limit, unknown=20_000), [0]
    (tmp_path / "a").write_bytes(bytes(size))

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()  # the end of the connection ends the body
        handler.wfile.write(bytes(size))

    async def picture(fetcher: Fetcher, row: Row) -> None:
        with Room(memory) as room:
            body = (await fetcher.get(row, room)).body
            assert room.size >= len(body) == size
            most.append(memory.used)
            await asyncio.sleep(0)  # as a decoder
        assert room.size == 0

    async def pictures(fetcher: Fetcher) -> None:
        rows = [Row(str(n), ("",), file=str(tmp_path / "a") if n % 2 else None) for n in range(12)]
        async with fetcher, asyncio.timeout(60):
            await asyncio.gather(*(picture(fetcher, row) for row in rows))

    with serving(answer) as host:
        run(pictures(fetcher_of(host, max_bytes=largest)))
    assert memory.used == 0 and max(most) <= limit + largest


def test_a_process_has_one_memory_of_bodies_for_all_recipes() -> None:
    assert shared(3).bodies is shared(4).bodies
    assert shared(3).decoders is shared(4).decoders
    assert shared(3).connections is not shared(4).connections
