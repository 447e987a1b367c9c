"""Download one row: fetch its picture, check it, and resize it by img2dataset."""

from __future__ import annotations

import asyncio
from io import BytesIO
from pathlib import Path
from typing import Any

from artifacts.hashing import digest_bytes
from configs.download import Download
from tasks.download.body_memory import Room
from tasks.download.decoding_bomb_checks import Header, check_picture
from tasks.download.decoding_memory import DECODING
from tasks.download.failure_reasons import FetchFailed
from tasks.download.fetch_with_retries import Fetcher
from tasks.download.resize_by_img2dataset import REASONS, img2dataset_parts
from tasks.download.rotate_and_reduce import reduction, rotate_and_reduce
from tasks.download.rows import Row
from tasks.download.sources import ServedAt

#: Pixels that a decoder skips need this many times less memory than those that are resized.
SKIPPED = 8


class RowDownloader:
    """Downloads the rows of a shard; an asynchronous context manager."""

    def __init__(self, settings: Download, served_at: ServedAt) -> None:
        resizer, self.is_disallowed = img2dataset_parts()
        self.settings = settings
        self.fetcher = Fetcher(settings, served_at)
        self.shared = self.fetcher.shared
        self.opt_outs = {value.strip().lower() for value in settings.opt_out_headers}
        sizes = (settings.image_size, settings.resize_mode, settings.only_if_bigger)
        encoding = {
            "encode_quality": settings.encode_quality,
            "encode_format": settings.encode_format,
        }
        self.resize = resizer(
            *sizes,
            **encoding,
            min_image_size=settings.min_image_size,
            max_image_area=settings.max_pixels,
            max_aspect_ratio=settings.max_aspect_ratio,
        )
        #: For reduced pictures, whose own size was checked before.
        self.resize_reduced = resizer(*sizes, **encoding)

    async def __aenter__(self) -> RowDownloader:
        await self.fetcher.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.fetcher.__aexit__()

    async def download(self, row: Row, file: Path) -> dict[str, Any]:
        """Write the resized picture to `file` and return the row's outcome.

        Returns:
            `status` (img2dataset's success, failed_to_download or failed_to_resize), then
            `error_message` and `attempts` (requests), or the four sizes in pixels and the fetched
            bytes' `sha256` (hex) and number (`bytes`).

        Raises:
            OSError: the file cannot be written.
        """
        attempts = 0
        try:
            with Room(self.shared.bodies) as room:
                body, headers, attempts = await self.fetcher.get(row, room)
                if self.is_disallowed(headers, self.fetcher.token, self.opt_outs):
                    raise FetchFailed("opted out")
                loop = asyncio.get_running_loop()
                found = await loop.run_in_executor(self.shared.decoders, self._write, body, file)
        except FetchFailed as failure:
            return _failed("failed_to_download", failure.reason, attempts or failure.attempts)
        if isinstance(found, str):
            return _failed("failed_to_resize", found, attempts)
        return found

    def _write(self, body: bytes, file: Path) -> dict[str, Any] | str:
        """Write the resized picture. Returns its sizes and sha256, or a failure reason."""
        header = check_picture(body, self.settings.max_pixels)
        scale = reduction(header, self.settings)
        if scale > 1 and (reason := self._refused(header)):
            return reason
        with DECODING.reserve(header.pixels // min(scale**2, SKIPPED), self.settings.max_pixels):
            upright = rotate_and_reduce(body, scale)
            resize = self.resize if scale == 1 else self.resize_reduced
            picture, *sizes, message = resize(BytesIO(upright.body))
        if message is not None:
            return REASONS.get(message, "cannot be resized")
        file.write_bytes(picture)
        if scale > 1:
            sizes[2:] = upright.width, upright.height
        names = ("width", "height", "original_width", "original_height")
        sized = dict(zip(names, map(int, sizes), strict=True))
        return {"status": "success", **sized, "sha256": digest_bytes(body), "bytes": len(body)}

    def _refused(self, header: Header) -> str | None:
        """Why img2dataset's resizer would refuse the size of the whole picture."""
        shorter, longer = sorted((header.width, header.height))
        if shorter < self.settings.min_image_size:
            return "too small"
        return "too thin" if longer / shorter > self.settings.max_aspect_ratio else None


def _failed(status: str, reason: str, attempts: int) -> dict[str, Any]:
    return {"status": status, "error_message": reason, "attempts": attempts}
