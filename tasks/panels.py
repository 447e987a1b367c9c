"""Panels: a stage's output for people, as markdown in the Prefect UI and as HTML.

Pictures are data URIs of limited size. A grid has pictures of one size.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

from PIL import Image, ImageOps

#: Maximum bytes of a picture in markdown. Prefect stores it three times: in the artifact, in the
#: newest artifact of its key, and in an event.
SMALL = 40_000


def data_uri(data: bytes, limit: int, kind: str = "png") -> str:
    """The picture as a data URI: its own bytes up to `limit`, else a WebP reduced until it fits."""
    if len(data) > limit:
        kind = "webp"
        data = _reduced(data, limit)
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _reduced(data: bytes, limit: int) -> bytes:
    with Image.open(BytesIO(data)) as image:
        picture = image.convert("RGB")
    while True:
        picture.save(buffer := BytesIO(), "WEBP", quality=70)
        if buffer.tell() <= limit or max(picture.size) <= 8:
            return buffer.getvalue()
        picture.thumbnail((max(1, picture.width * 3 // 4), max(1, picture.height * 3 // 4)))


#: Maximum bytes of a picture in HTML; a panel of several pictures shares LARGE_SUM. A page of two
#: pictures and two such panels is below 5 MB in base64.
LARGE = 700_000
LARGE_SUM = 1_000_000


@dataclass(frozen=True)
class Table:
    """Rows under a title; every row has the same keys."""

    kind: ClassVar = "table"
    title: str
    rows: Sequence[Mapping[str, Any]]
    bars: str | None = None  # column of numbers that HTML shows as bars

    @property
    def largest(self) -> float:
        """The largest number of the column `bars`."""
        return max((float(row[self.bars]) for row in self.rows), default=0) if self.bars else 0


@dataclass(frozen=True)
class Facts:
    """Names and values under a title."""

    kind: ClassVar = "facts"
    title: str
    values: Mapping[str, Any]

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        return [{"": name, " ": value} for name, value in self.values.items()]


@dataclass(frozen=True)
class PicturePanel:
    """A PNG under a title."""

    kind: ClassVar = "picture"
    title: str
    png: bytes

    @property
    def data_uri(self) -> str:
        return data_uri(self.png, LARGE)

    def small_uri(self) -> str:
        return data_uri(self.png, SMALL)


@dataclass(frozen=True)
class Chart:
    """An SVG of `tasks.panels_charts` under a title."""

    kind: ClassVar = "chart"
    title: str
    svg: str

    def small_uri(self) -> str:
        data = self.svg.encode()
        return data_uri(data, len(data), "svg+xml")  # an SVG cannot be reduced


@dataclass(frozen=True)
class Strip:
    """Pictures over training: (label, PNG) in order. Markdown shows the last picture."""

    kind: ClassVar = "strip"
    title: str
    pictures: Sequence[tuple[str, bytes]]

    @property
    def frames(self) -> list[tuple[str, str]]:
        """(label, data URI) in order."""
        limit = LARGE_SUM // max(1, len(self.pictures))
        return [(label, data_uri(png, limit)) for label, png in self.pictures]

    def small_uri(self) -> str:
        return data_uri(self.pictures[-1][1], SMALL)


@dataclass(frozen=True)
class Comparison:
    """Pictures of one prompt by several models, side by side. Markdown shows the grid of all."""

    kind: ClassVar = "comparison"
    title: str
    models: Sequence[str]
    prompts: Sequence[tuple[str, Sequence[bytes]]]  # (prompt, a PNG per model)
    grid: bytes  # PNG
    beside: Sequence[Sequence[tuple[str, bytes]]] = ()  # (label, PNG) beside those of each prompt

    @property
    def figures(self) -> list[dict[str, Any]]:
        """Prompt, data URIs, width in pixels, and (label, data URI) of what is beside."""
        pictures = len(self.prompts) * len(self.models) + sum(map(len, self.beside))
        limit = LARGE_SUM // max(1, pictures)
        beside = self.beside or [()] * len(self.prompts)
        return [
            {
                "prompt": prompt,
                "uris": [data_uri(png, limit) for png in pngs],
                "width": Image.open(BytesIO(pngs[0])).width,
                "beside": [(label, data_uri(png, limit)) for label, png in pictured],
            }
            for (prompt, pngs), pictured in zip(self.prompts, beside, strict=True)
        ]

    def small_uri(self) -> str:
        return data_uri(self.grid, SMALL)


@dataclass(frozen=True)
class Gallery:
    """Pictures with a text each. Markdown shows the grid of all, without texts."""

    kind: ClassVar = "pictures"
    title: str
    pictures: Sequence[tuple[bytes, str]]  # (file, text)
    side: int = 128  # pixels of a square that holds a picture

    @property
    def figures(self) -> list[tuple[str, str]]:
        """(data URI, text) in order."""
        return [(data_uri(data, SMALL, "webp"), text) for data, text in self.pictures]

    def small_uri(self) -> str:
        squares = (self._square(data) for data, _ in self.pictures)
        grid = picture_grid(squares, len(self.pictures), 8, gap=2)
        return data_uri(to_png(grid), SMALL)

    def _square(self, data: bytes) -> Image.Image:
        with Image.open(BytesIO(data)) as picture:
            return ImageOps.pad(picture.convert("RGB"), (self.side, self.side), color="white")


@dataclass(frozen=True)
class Links:
    """Names and paths of pages of the Prefect UI. Markdown alone shows them."""

    kind: ClassVar = "links"
    title: str
    paths: Mapping[str, str]


Panel = Table | PicturePanel | Facts | Chart | Strip | Comparison | Gallery | Links


def to_markdown(heading: str, panels: Sequence[Panel]) -> str:
    """GitHub-flavoured markdown with small pictures, with all external text escaped."""
    parts = [f"# {escape_markdown(heading)}"]
    for panel in panels:
        parts.append(f"## {escape_markdown(panel.title)}")
        if isinstance(panel, Links):
            links = (f"[{escape_markdown(n)}]({path})" for n, path in panel.paths.items())
            parts.append(" · ".join(links))
        elif isinstance(panel, Facts):
            # A table has a header, which would be empty here.
            facts = ((escape_markdown(n), human(value)) for n, value in panel.values.items())
            parts.append("\n".join(f"* **{n}**: {escape_markdown(words)}" for n, words in facts))
        elif isinstance(panel, Table):
            parts.append(markdown_table(panel.rows))
        else:
            parts.append(f"![{escape_markdown(panel.title)}]({panel.small_uri()})")
    return "\n\n".join(parts) + "\n"


def render_html(template: str, **values: Any) -> str:
    """A Jinja2 template of this folder, with all values escaped."""
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    loader = FileSystemLoader(Path(__file__).parent)
    templates = Environment(loader=loader, autoescape=True, trim_blocks=True)
    templates.filters |= {"human": human, "svg": Markup}
    return templates.get_template(template).render(values)


def escape_markdown(text: object) -> str:
    """The text without HTML, links, pictures, tables and emphasis in markdown."""
    line = html.escape(" ".join(str(text).split()), quote=False)
    line = re.sub(r"([\\`*_{}\[\]()#|!~])", r"\\\1", line)
    # GitHub's markdown converts bare addresses to links.
    return line.replace("://", ":&#47;&#47;").replace("www.", "www&#46;")


def human(value: object) -> str:
    """A value for people: four significant digits, whole above 9,999, thousands separated."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 9999.5 else f"{value:,.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def aligned(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of a table for a terminal, its titles first; none without rows."""
    cells = [[human(value) for value in row.values()] for row in rows]
    cells = [list(rows[0]), *cells] if rows else []
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table in GitHub-flavoured markdown, with all external text escaped."""
    if not rows:
        return "none"
    names = list(rows[0])
    cells = [names, *([human(row[name]) for name in names] for row in rows)]
    lines = ["| " + " | ".join(map(escape_markdown, line)) + " |" for line in cells]
    return "\n".join([lines[0], "|" + "---|" * len(names), *lines[1:]])


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
        across = picture.width + gap
        down = picture.height + gap
        if number == 0:
            size = (columns * across - gap, -(-count // columns) * down - gap)
            page = Image.new("RGB", size, paper)
        page.paste(picture, (number % columns * across, number // columns * down))
    return page


def to_png(image: Image.Image) -> bytes:
    """The picture as a PNG file."""
    image.save(buffer := BytesIO(), "png")
    return buffer.getvalue()
