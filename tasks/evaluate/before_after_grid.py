"""The before/after grid: the base model's pictures above the tuned model's."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from tasks.picture_grid import picture_grid, to_png

CELL = (96, 256)  # minimum and maximum width of a cell, pixels
COLUMNS = 10
MARGIN, LABEL, LINE, LINES = 6, 64, 13, 4
INK, PAPER = (40, 30, 25), (250, 246, 240)

#: A prompt, and model -> its picture u8 [H, W, 3], in row order.
Column = tuple[str, Mapping[str, NDArray[np.uint8]]]


def choose(prompts: Sequence[str], limit: int = COLUMNS) -> list[int]:
    """Indices of the first picture of each distinct prompt, `limit` at most."""
    return [prompts.index(prompt) for prompt in islice(dict.fromkeys(prompts), limit)]


def render(sets: dict[str, list[Column]]) -> bytes:
    """PNG bytes with one block per prompt set, one row per model, one column per prompt."""
    _, rows = next(iter(sets.values()))[0]
    cell = _cell_size(next(iter(rows.values())))
    widest = max(len(columns) for columns in sets.values())
    block = LINE + MARGIN + LINES * LINE + len(rows) * (cell[1] + MARGIN) + MARGIN
    width = LABEL + widest * (cell[0] + MARGIN) + MARGIN
    page = Image.new("RGB", (width, len(sets) * block + MARGIN), PAPER)
    for index, (name, columns) in enumerate(sets.items()):
        _draw_block(page, MARGIN + index * block, name, columns, cell)
    return to_png(page)


def _draw_block(
    page: Image.Image,
    top: int,
    name: str,
    columns: list[Column],
    cell: tuple[int, int],
) -> None:
    pen = ImageDraw.Draw(page)
    small, large = ImageFont.load_default(11), ImageFont.load_default(14)
    pen.text((MARGIN, top), f"prompts: {name}", INK, large)
    first_row = top + LINE + MARGIN + LINES * LINE
    cells = []
    for number, model in enumerate(columns[0][1]):
        middle = first_row + number * (cell[1] + MARGIN) + cell[1] // 2
        pen.text((MARGIN, middle), model, INK, large, anchor="lm")
        cells += [_fit(pictures[model], cell) for _, pictures in columns]
    for index, (prompt, _) in enumerate(columns):
        left = LABEL + index * (cell[0] + MARGIN)
        words = textwrap.wrap(prompt, max(8, cell[0] // 6), max_lines=LINES, placeholder="…")
        pen.multiline_text((left, top + LINE + MARGIN - 2), "\n".join(words), INK, small, spacing=1)
    block = picture_grid(cells, len(cells), len(columns), gap=MARGIN, paper=PAPER)
    page.paste(block, (LABEL, first_row))


def _cell_size(picture: NDArray[np.uint8]) -> tuple[int, int]:
    """Width and height of a cell in pixels.

    Pictures below the minimum width are scaled by an integer, those above the maximum shrink.
    """
    height, width = picture.shape[:2]
    scale = math.ceil(CELL[0] / width) if width < CELL[0] else min(1.0, CELL[1] / width)
    return round(width * scale), round(height * scale)


def _fit(picture: NDArray[np.uint8], cell: tuple[int, int]) -> Image.Image:
    image = Image.fromarray(picture)
    grows = cell[0] >= image.width
    return image.resize(cell, Image.Resampling.NEAREST if grows else Image.Resampling.LANCZOS)
