"""Pictures of panels as data URIs of limited size."""

from __future__ import annotations

import base64
from io import BytesIO

#: Maximum bytes of a picture in markdown. Prefect stores it three times: in the artifact, in the
#: newest artifact of its key, and in an event.
SMALL = 40_000


def data_uri(data: bytes, limit: int, kind: str = "png") -> str:
    """The picture as a data URI: its own bytes up to `limit`, else a WebP reduced until it fits."""
    if len(data) > limit:
        kind, data = "webp", _reduced(data, limit)
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def width_of(png: bytes) -> int:
    """Width of a picture in pixels."""
    from PIL import Image

    with Image.open(BytesIO(png)) as image:
        return image.width


def _reduced(data: bytes, limit: int) -> bytes:
    from PIL import Image

    with Image.open(BytesIO(data)) as image:
        picture = image.convert("RGB")
    while True:
        picture.save(buffer := BytesIO(), "WEBP", quality=70)
        if buffer.tell() <= limit or max(picture.size) <= 8:
            return buffer.getvalue()
        picture.thumbnail((max(1, picture.width * 3 // 4), max(1, picture.height * 3 // 4)))
