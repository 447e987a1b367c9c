"""Checks of downloaded bytes before they are decoded: format, number of pixels, JPEG scans."""

from __future__ import annotations

import re
from functools import cache
from io import BytesIO
from typing import NamedTuple

from tasks.download.failure_reasons import FetchFailed

#: Accepted formats. The list keeps hostile bytes away from Pillow's rarer decoders.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
#: A JPEG scan header (ITU-T T.81, B.2.3). Each scan can cost a pass over all pixels.
SCAN = re.compile(rb"\xff\xda\x00[\x08\x0a\x0c\x0e][\x01-\x04]")
MAX_SCANS = 100  # encoders write about 10


class Header(NamedTuple):
    """What the header of a picture declares."""

    width: int  # pixels, before the rotation by EXIF
    height: int
    is_reducible: bool  # a JPEG that can be decoded at a reduced scale: grey or YCbCr

    @property
    def pixels(self) -> int:
        return self.width * self.height


def check_picture(body: bytes, max_pixels: int) -> Header:
    """The header of a picture.

    Raises:
        FetchFailed: not a picture, more than `max_pixels` pixels or too slow to decode.
    """
    from PIL import Image

    try:
        with Image.open(BytesIO(body), formats=known_formats()) as image:
            is_reducible = image.format == "JPEG" and image.mode in ("L", "RGB")
            header = Header(*image.size, is_reducible)
    except Image.DecompressionBombError:
        raise FetchFailed("too many pixels") from None
    except Exception:  # a parser of hostile bytes may raise any type
        raise FetchFailed("not an image") from None
    if header.pixels > max_pixels:
        raise FetchFailed("too many pixels")
    if body.startswith(b"\xff\xd8") and len(SCAN.findall(body)) > MAX_SCANS:
        raise FetchFailed("too many scans")
    return header


@cache
def known_formats() -> tuple[str, ...]:
    """The FORMATS that this build of Pillow supports."""
    from PIL import Image

    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)
