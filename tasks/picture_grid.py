"""Lay out pictures of one size in a grid."""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO

from PIL import Image


def picture_grid(
    pictures: Iterable[Image.Image],
    count: int,
    columns: int,
    *,
    gap: int,
    paper: str | tuple[int, int, int] = "white",
) -> Image.Image:
    """A page of pictures in row order; one of them is in memory at a time.

    Args:
        pictures: one or more pictures of one size.
        count: number of pictures.
        columns: maximum pictures per row.
        gap: pixels between pictures.
        paper: colour between pictures.
    """
    columns = min(columns, count)
    page = Image.new("RGB", (0, 0))
    for number, picture in enumerate(pictures):
        across, down = picture.width + gap, picture.height + gap
        if number == 0:
            size = (columns * across - gap, -(-count // columns) * down - gap)
            page = Image.new("RGB", size, paper)
        page.paste(picture, (number % columns * across, number // columns * down))
    return page


def to_png(image: Image.Image) -> bytes:
    """The picture as a PNG file."""
    buffer = BytesIO()
    image.save(buffer, "png")
    return buffer.getvalue()
