"""Download one row: fetch its picture, check it, and resize it by img2dataset."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from artifacts.records import digest_bytes
from configs.settings.data import Download
from tasks.download.body_memory import Room
from tasks.download.fetch_with_robots_and_retries import Fetcher
from tasks.download.filter_resize_encode_by_img2dataset import PictureResizer
from tasks.download.opt_out_headers import is_opted_out
from tasks.download.retryable_and_final_failures import FetchFailed
from tasks.download.row_fields_and_hash import Row
from tasks.download.source_protocol import ServedAt


class RowDownloader:
    """Downloads the rows of a shard; an asynchronous context manager."""

    def __init__(self, settings: Download, served_at: ServedAt) -> None:
        self.resizer = PictureResizer(settings)
        self.fetcher = Fetcher(settings, served_at)
        self.shared = self.fetcher.shared
        self.opt_outs = {value.strip().lower() for value in settings.opt_out_headers}

    async def __aenter__(self) -> RowDownloader:
        await self.fetcher.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.fetcher.__aexit__()

    async def download(self, row: Row, keep: Callable[[bytes], None]) -> dict[str, Any]:
        """Fetch and resize a row's picture.

        Args:
            keep: receives the resized picture, in a thread of the decoders.

        Returns the row's outcome:
            `status` (img2dataset's success, failed_to_download or failed_to_resize), then
            `error_message` and `attempts` (requests), or the four sizes in pixels and the fetched
            bytes' `sha256` (hex) and number (`bytes`).

        Raises what `keep` raises.
        """
        attempts = 0
        try:
            with Room(self.shared.bodies) as room:
                body, headers, attempts = await self.fetcher.get(row, room)
                if is_opted_out(headers, self.fetcher.token, self.opt_outs):
                    raise FetchFailed("opted out")
                loop = asyncio.get_running_loop()
                found = await loop.run_in_executor(self.shared.decoders, self._resize, body, keep)
        except FetchFailed as failure:
            return _failed("failed_to_download", failure.reason, attempts or failure.attempts)
        if isinstance(found, str):
            return _failed("failed_to_resize", found, attempts)
        return found

    def _resize(self, body: bytes, keep: Callable[[bytes], None]) -> dict[str, Any] | str:
        """Keep the resized picture. Returns its sizes and sha256, or a failure reason."""
        resized = self.resizer.resize(body)
        if isinstance(resized, str):
            return resized
        keep(resized.picture)
        names = ("width", "height", "original_width", "original_height")
        sizes = {name: getattr(resized, name) for name in names}
        return {"status": "success", **sizes, "sha256": digest_bytes(body), "bytes": len(body)}


def _failed(status: str, reason: str, attempts: int) -> dict[str, Any]:
    return {"status": status, "error_message": reason, "attempts": attempts}
