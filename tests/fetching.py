"""Rows of a download, fetched from web sites on loopback."""

import asyncio
from typing import Any

from web_sites import Site

from configs.settings.data import Download
from tasks.download.fetch_with_retries import Fetched, Fetcher, run
from tasks.download.http import BodyMemory, FetchFailed, Room
from tasks.download.lists import ServedAt
from tasks.download.politeness import AsyncClock
from tasks.download.rows import Row


def settings_for(site: Site, **settings: Any) -> Download:
    chosen = {"allow_hosts": (site.host,), "backoff": 0.0, "retries": 0, "timeout": 60.0}
    return Download(**{**chosen, "max_requests_per_host": None, **settings})


def outcomes(site: Site, *paths: str, **settings: Any) -> list[str]:
    """`ok` or the failure reason of each path, fetched at once by one shard."""
    fetcher = Fetcher(settings_for(site, **settings), ServedAt(f"http://{site.host}"))

    async def all_outcomes() -> list[str]:
        async with fetcher:
            return await asyncio.gather(*(outcome(fetcher, path) for path in paths))

    return run(all_outcomes())


async def outcome(fetcher: Fetcher, path: str) -> str:
    """`ok` or the failure reason of a path."""
    try:
        with Room(BodyMemory(10**6)) as room:
            await fetcher.get(Row(path, ("",)), room)
    except FetchFailed as failure:
        return failure.reason
    return "ok"


def get_row(fetcher: Fetcher, row: Row) -> Fetched:
    async def fetched() -> Fetched:
        async with fetcher:
            with Room(BodyMemory(10**6)) as room:
                return await fetcher.get(row, room)

    return run(fetched())


def fetcher_of(host: str, clock: AsyncClock | None = None, **settings: Any) -> Fetcher:
    chosen = {"backoff": 0.01, "timeout": 60.0, "retries": 2, **settings}
    return Fetcher(Download(**chosen), ServedAt(f"http://{host}/base", (host,)), clock)
