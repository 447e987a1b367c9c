"""Panels: a stage's output for people, as markdown in the Prefect UI and as HTML."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

#: Maximum bytes of a picture in markdown, which Prefect stores in its database.
SMALL = 64_000


@dataclass(frozen=True)
class Table:
    """Rows under a title; every row has the same keys."""

    title: str
    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Picture:
    """A PNG under a title."""

    title: str
    png: bytes

    @property
    def data_uri(self) -> str:
        return _data_uri("png", self.png)

    def small_uri(self) -> str:
        """The picture as a data URI: the PNG if it is small, else a JPEG reduced until it is."""
        if len(self.png) <= SMALL:
            return self.data_uri
        from PIL import Image

        with Image.open(BytesIO(self.png)) as image:
            picture = image.convert("RGB")
        while True:
            picture.save(buffer := BytesIO(), "JPEG", quality=85)
            if buffer.tell() <= SMALL:
                return _data_uri("jpeg", buffer.getvalue())
            picture.thumbnail((picture.width * 3 // 4, picture.height * 3 // 4))


def _data_uri(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


@dataclass(frozen=True)
class Facts:
    """Names and values under a title."""

    title: str
    values: Mapping[str, Any]

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        return [{"": name, " ": value} for name, value in self.values.items()]


Panel = Table | Picture | Facts


def to_markdown(heading: str, panels: Sequence[Panel]) -> str:
    """GitHub-flavoured markdown with small pictures, with all external text escaped."""
    parts = [f"# {escape_markdown(heading)}"]
    for panel in panels:
        parts.append(f"## {escape_markdown(panel.title)}")
        if isinstance(panel, Picture):
            parts.append(f"![{escape_markdown(panel.title)}]({panel.small_uri()})")
        else:
            parts.append(markdown_table(panel.rows))
    return "\n\n".join(parts) + "\n"


def render_html(template: str, **values: Any) -> str:
    """A Jinja2 template of this folder, with all values escaped."""
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader(Path(__file__).parent)
    templates = Environment(loader=loader, autoescape=True, trim_blocks=True)
    templates.filters["human"] = human
    return templates.get_template(template).render(values)


def escape_markdown(text: Any) -> str:
    """The text without HTML, links, pictures, tables and emphasis in markdown."""
    line = html.escape(" ".join(str(text).split()), quote=False)
    line = re.sub(r"([\\`*_{}\[\]()#|!~])", r"\\\1", line)
    # GitHub's markdown converts bare addresses to links.
    return line.replace("://", ":&#47;&#47;").replace("www.", "www&#46;")


def human(value: Any) -> str:
    """A value for people: four significant digits, thousands separated."""
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e6 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table in GitHub-flavoured markdown, with all external text escaped."""
    if not rows:
        return "none"
    names = list(rows[0])
    cells = [names, *([human(row[name]) for name in names] for row in rows)]
    lines = ["| " + " | ".join(map(escape_markdown, line)) + " |" for line in cells]
    return "\n".join([lines[0], "|" + "---|" * len(names), *lines[1:]])
