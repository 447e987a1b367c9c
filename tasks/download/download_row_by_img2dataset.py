"""Download one row: fetch its picture, check it, and resize it by img2dataset.

img2dataset's resizer also refuses pictures below `download.min_image_size`.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from artifacts.hashing import digest_bytes
from configs.download import Download
from tasks.download.decoding_bomb_checks import check_picture
from tasks.download.decoding_memory import DECODING
from tasks.download.exif_orientation import apply_orientation
from tasks.download.failure_reasons import FetchFailed
from tasks.download.fetch_with_retries import Fetcher
from tasks.download.rows import Row
from tasks.download.sources import ServedAt

#: The resizer's error message -> the failure reason in our records.
REASONS = {
    "Image decoding error": "not an image",
    "image too small": "too small",
    "image area too large": "too many pixels",
    "aspect ratio too large": "too thin",
}


class RowDownloader:
    """Downloads the rows of a shard; threads may share it."""

    def __init__(self, settings: Download, served_at: ServedAt) -> None:
        resizer, self.is_disallowed = img2dataset_parts()
        self.max_pixels = settings.max_pixels
        self.fetcher = Fetcher(settings, served_at)
        self.opt_outs = {value.strip().lower() for value in settings.opt_out_headers}
        self.resize = resizer(
            settings.image_size,
            settings.resize_mode,
            settings.only_if_bigger,
            encode_quality=settings.encode_quality,
            encode_format=settings.encode_format,
            min_image_size=settings.min_image_size,
            max_image_area=settings.max_pixels,
            max_aspect_ratio=settings.max_aspect_ratio,
        )

    def download(self, row: Row, file: Path) -> dict[str, Any]:
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
            body, headers, attempts = self.fetcher.get(row)
            if self.is_disallowed(headers, self.fetcher.token, self.opt_outs):
                raise FetchFailed("opted out")
            pixels = check_picture(body, self.max_pixels)
            with DECODING.reserve(pixels, self.max_pixels):
                *resized, message = self.resize(BytesIO(apply_orientation(body)))
        except FetchFailed as failure:
            return _failed("failed_to_download", failure.reason, attempts or failure.attempts)
        if message is not None:
            reason = REASONS.get(message, "cannot be resized")
            return _failed("failed_to_resize", reason, attempts)
        picture, *sizes = resized
        file.write_bytes(picture)
        names = ("width", "height", "original_width", "original_height")
        sized = dict(zip(names, map(int, sizes), strict=True))
        return {"status": "success", **sized, "sha256": digest_bytes(body), "bytes": len(body)}


def _failed(status: str, reason: str, attempts: int) -> dict[str, Any]:
    return {"status": status, "error_message": reason, "attempts": attempts}


@cache
def img2dataset_parts() -> tuple[Any, Any]:
    """img2dataset's Resizer and is_disallowed, imported on demand: the import takes seconds."""
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # no version check over the network
    import img2dataset.resizer
    from img2dataset.downloader import is_disallowed

    # It redirects the stdout and stderr of the whole process during decoding. Two threads that do
    # so at once lose the original streams, and other threads lose their output.
    img2dataset.resizer.SuppressStdoutStderr = nullcontext
    return img2dataset.resizer.Resizer, is_disallowed
