"""Check, rotate and resize a fetched picture by img2dataset's resizer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import Any

from configs.settings.data import Download
from runtimes.process.memory import check_memory
from tasks.download.decoding_bomb_checks import Header, bounded_metadata, check_picture
from tasks.download.decoding_memory import BYTES_PER_PIXEL, DECODING
from tasks.download.import_img2dataset_modules import img2dataset_module
from tasks.download.rotate_and_reduce import reduction, rotate_and_reduce

#: The resizer's error message -> the failure reason in our records.
REASONS = {
    "Image decoding error": "not an image",
    "image too small": "too small",
    "image area too large": "too many pixels",
    "aspect ratio too large": "too thin",
}
#: Why a picture was not resized, if it is not for its size.
UNDECODED = ("not an image", "cannot be resized")
#: Pixels that a decoder skips need this many times less memory than those that are resized.
SKIPPED = 8


@cache
def img2dataset_resizer() -> Any:
    """img2dataset's class Resizer, imported on demand: the import takes a second."""
    module = img2dataset_module("resizer")
    # It redirects the stdout and stderr of the whole process during decoding. Two threads that do
    # so at once lose the original streams, and other threads lose their output.
    module.SuppressStdoutStderr = nullcontext
    # It makes transforms for each picture, 0.2 to 0.6 ms of Python beside 3 ms of OpenCV.
    module.A = _ReusedTransforms(module.A)
    return module.Resizer


class _ReusedTransforms(threading.local):
    """albumentations, whose transforms are made once per thread and settings."""

    def __init__(self, albumentations: Any) -> None:
        self._albumentations = albumentations
        self._transforms: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def transform(**settings: Any) -> Any:
            key = f"{name} {settings}"
            if key not in self._transforms:
                self._transforms[key] = getattr(self._albumentations, name)(**settings)
            return self._transforms[key]

        return transform


@dataclass(frozen=True)
class Resized:
    """A resized picture, encoded as `download.encode_format`; its sizes in pixels."""

    picture: bytes
    width: int
    height: int
    original_width: int
    original_height: int


class PictureResizer:
    """Resizes pictures in threads, within the memory of all decoders of the process."""

    def __init__(self, settings: Download) -> None:
        resizer = img2dataset_resizer()
        self.settings = settings
        sizes = (settings.image_size, settings.resize_mode, settings.only_if_bigger)
        encoding = {
            "encode_quality": settings.encode_quality,
            "encode_format": settings.encode_format,
        }
        self._resize = resizer(
            *sizes,
            **encoding,
            min_image_size=settings.min_image_size,
            max_image_area=settings.max_pixels,
            max_aspect_ratio=settings.max_aspect_ratio,
        )
        #: For reduced pictures, whose own size was checked before.
        self._resize_reduced = resizer(*sizes, **encoding)

    def resize(self, body: bytes) -> Resized | str:
        """The resized picture, or a failure reason.

        Raises:
            FetchFailed: the body is no picture, or one that would take too much memory.
            MemoryError: this process lacks memory, even if it decodes nothing else.
        """
        body = bounded_metadata(body)
        most = self.settings.max_pixels
        try:
            return self._resized(body, is_alone=False)
        except MemoryError:
            with DECODING.reserve(most, most):
                return self._resized(body, is_alone=True)

    def _resized(self, body: bytes, *, is_alone: bool) -> Resized | str:
        most = self.settings.max_pixels
        header = check_picture(body, most)
        scale = reduction(header, self.settings)
        if scale > 1 and (reason := self._refused(header)):
            return reason
        pixels = header.pixels // min(scale**2, SKIPPED)
        with nullcontext() if is_alone else DECODING.reserve(pixels, most):
            resized: Resized | str = UNDECODED[0]
            try:
                resized = self._decoded(body, header, scale)
                return resized
            finally:
                if resized in UNDECODED:  # others may since have freed what all may have
                    check_memory(BYTES_PER_PIXEL * (pixels if is_alone else most))

    def _decoded(self, body: bytes, header: Header, scale: int) -> Resized | str:
        upright = rotate_and_reduce(body, scale)
        resize = self._resize if scale == 1 else self._resize_reduced
        picture, *sizes, message = resize(BytesIO(upright.body))
        if message is not None:
            return REASONS.get(message, "cannot be resized")
        if upright.body is body and sizes[2:] != [header.width, header.height]:
            return "not an image"  # one of its two sizes is a lie
        if scale > 1:
            sizes[2:] = upright.width, upright.height
        return Resized(picture, *map(int, sizes))

    def _refused(self, header: Header) -> str | None:
        """Why img2dataset's resizer would refuse the size of the whole picture."""
        shorter, longer = sorted((header.width, header.height))
        if shorter < self.settings.min_image_size:
            return "too small"
        return "too thin" if longer / shorter > self.settings.max_aspect_ratio else None
