"""Panels: a stage's output for people, as markdown in the Prefect UI and as HTML."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tasks.panels_pictures import SMALL, data_uri, width_of

#: Maximum bytes of a picture in HTML; a panel of several pictures shares LARGE_SUM. A page of two
#: pictures and two such panels is below 5 MB in base64.
LARGE, LARGE_SUM = 700_000, 1_000_000


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
    """Pictures over training: (label, PNG) in order. Markdown shows the last one."""

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

    @property
    def figures(self) -> list[dict[str, Any]]:
        """Prompt, data URIs and width in pixels."""
        limit = LARGE_SUM // max(1, len(self.prompts) * len(self.models))
        return [
            {
                "prompt": prompt,
                "uris": [data_uri(png, limit) for png in pngs],
                "width": width_of(pngs[0]),
            }
            for prompt, pngs in self.prompts
        ]

    def small_uri(self) -> str:
        return data_uri(self.grid, SMALL)


@dataclass(frozen=True)
class Links:
    """Names and paths of pages of the Prefect UI. Markdown alone shows them."""

    kind: ClassVar = "links"
    title: str
    paths: Mapping[str, str]


Panel = Table | PicturePanel | Facts | Chart | Strip | Comparison | Links


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
            parts.append("\n".join(markdown_fact(*fact) for fact in panel.values.items()))
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


def markdown_fact(name: str, value: object) -> str:
    """An item of a list in markdown, with all external text escaped."""
    return f"* **{escape_markdown(name)}**: {escape_markdown(human(value))}"


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table in GitHub-flavoured markdown, with all external text escaped."""
    if not rows:
        return "none"
    names = list(rows[0])
    cells = [names, *([human(row[name]) for name in names] for row in rows)]
    lines = ["| " + " | ".join(map(escape_markdown, line)) + " |" for line in cells]
    return "\n".join([lines[0], "|" + "---|" * len(names), *lines[1:]])
