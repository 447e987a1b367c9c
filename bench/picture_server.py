"""A loopback server of JPEGs for bench.download: `python -m bench.picture_server FOLDER`.

It prints its port. /KIND/fast/NUMBER.jpg is one of the pictures in FOLDER/KIND, and
/KIND/slow/NUMBER.jpg answers after 0.5 to 2 s. /seconds answers the seconds since the first of
these requests after the last request of /seconds.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
from pathlib import Path

from aiohttp import web

FASTEST = 0.5
SLOWEST = 2.0  # seconds


def delay(name: str) -> float:
    """Seconds until the slow answer to a request: the same in each run."""
    share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32
    return FASTEST + share * (SLOWEST - FASTEST)


async def serve(folder: Path) -> None:
    """Serve until standard input ends."""
    pictures = {
        kind.name: [file.read_bytes() for file in sorted(kind.glob("*.jpg"))]
        for kind in folder.iterdir()
        if kind.is_dir()
    }

    first: list[float] = []  # time of the first request

    async def seconds(_: web.Request) -> web.Response:
        elapsed = time.monotonic() - first.pop() if first else 0.0
        return web.Response(text=str(elapsed))

    async def answer(request: web.Request) -> web.Response:
        chosen = pictures.get(request.match_info["kind"])
        if chosen is None:
            raise web.HTTPNotFound
        if not first:
            first.append(time.monotonic())
        if request.match_info["pace"] == "slow":
            await asyncio.sleep(delay(request.path))
        body = chosen[int(request.match_info["number"]) % len(chosen)]
        return web.Response(body=body, content_type="image/jpeg")

    app = web.Application()
    app.router.add_get("/seconds", seconds)
    app.router.add_get("/{kind}/{pace}/{number}.jpg", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=2048)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
