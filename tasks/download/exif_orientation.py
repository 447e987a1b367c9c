"""Rotate a picture upright by its EXIF orientation."""

from __future__ import annotations

from io import BytesIO

from tasks.download.decoding_bomb_checks import known_formats
from tasks.download.failure_reasons import FetchFailed

ORIENTATION = 0x0112  # EXIF tag; 1 is upright
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


def apply_orientation(body: bytes) -> bytes:
    """The picture with its EXIF orientation applied: PNG bytes, or `body` if it is upright.

    img2dataset ignores and drops the EXIF tag.

    Raises:
        FetchFailed: the picture cannot be decoded.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(BytesIO(body), formats=known_formats()) as image:
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
