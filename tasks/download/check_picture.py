"""Check downloaded bytes: an image of a known format, not too large, upright."""

from __future__ import annotations

import re
from functools import cache
from io import BytesIO

from tasks.download.failures import FetchFailed

#: Accepted formats. The list keeps hostile bytes away from Pillow's rarer decoders.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
ORIENTATION = 0x0112  # EXIF tag; 1 is upright
#: A JPEG scan header (ITU-T T.81, B.2.3). Each scan can cost a pass over all pixels.
SCAN = re.compile(rb"\xff\xda\x00[\x08\x0a\x0c\x0e][\x01-\x04]")
MAX_SCANS = 100  # encoders write about 10
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


def check_picture(body: bytes, max_pixels: int) -> int:
    """The number of pixels that the header of a picture declares.

    Raises:
        FetchFailed: not a picture, more than `max_pixels` pixels or too slow to decode.
    """
    from PIL import Image

    try:
        with Image.open(BytesIO(body), formats=_known_formats()) as image:
            width, height = image.size
    except Image.DecompressionBombError:
        raise FetchFailed("too many pixels") from None
    except Exception:  # a parser of hostile bytes may raise any type
        raise FetchFailed("not an image") from None
    if width * height > max_pixels:
        raise FetchFailed("too many pixels")
    if body.startswith(b"\xff\xd8") and len(SCAN.findall(body)) > MAX_SCANS:
        raise FetchFailed("too many scans")
    return int(width * height)


def apply_orientation(body: bytes) -> bytes:
    """The picture with its EXIF orientation applied: PNG bytes, or `body` if it is upright.

    img2dataset ignores and drops the EXIF tag.

    Raises:
        FetchFailed: the picture cannot be decoded.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(BytesIO(body), formats=_known_formats()) as image:
            try:
                orientation = image.getexif().get(ORIENTATION, 1)
            except Exception:  # a damaged tag does not make the picture unusable
                orientation = 1
            if orientation not in range(2, 9):
                return body
            rotated = ImageOps.exif_transpose(image)
            if rotated.mode not in PNG_MODES:
                rotated = rotated.convert("RGB")
            buffer = BytesIO()
            rotated.save(buffer, "PNG", compress_level=0)  # decoded again at once
            return buffer.getvalue()
    except Exception:  # any type, as in `check_picture`
        raise FetchFailed("not an image") from None


@cache
def _known_formats() -> tuple[str, ...]:
    """The FORMATS that this build of Pillow supports."""
    from PIL import Image

    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)
