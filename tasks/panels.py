"""What a stage shows of itself, as data: rendered to markdown for the Prefect UI and to HTML."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

#: Most bytes of a picture in markdown, which Prefect keeps in its database.
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
        """The picture itself if it is small, else a JPEG of it, made smaller until it is."""
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


Panel = Table | Picture | Facts


def to_markdown(heading: str, panels: Sequence[Panel]) -> str:
    """GitHub-flavoured markdown with small pictures; whatever came from outside is escaped."""
    parts = [f"# {escape_markdown(heading)}"]
    for panel in panels:
        parts.append(f"## {escape_markdown(panel.title)}")
        if isinstance(panel, Picture):
            parts.append(f"![{escape_markdown(panel.title)}]({panel.small_uri()})")
        else:
            parts.append(_markdown_table(_rows(panel)))
    return "\n\n".join(parts) + "\n"


def to_html(panels: Sequence[Panel]) -> str:
    """HTML of the panels, without a page around them; whatever came from outside is escaped."""
    parts = []
    for panel in panels:
        title = html.escape(panel.title)
        if isinstance(panel, Picture):
            parts.append(
                f'<figure><img src="{panel.data_uri}" alt="{title}">'
                f"<figcaption>{title}</figcaption></figure>"
            )
        else:
            parts.append(f"<h3>{title}</h3>{_html_table(_rows(panel))}")
    return "\n".join(parts)


def escape_markdown(text: Any) -> str:
    """Text that markdown shows as it is: no HTML, links, pictures, tables or emphasis."""
    line = html.escape(" ".join(str(text).split()), quote=False)
    line = re.sub(r"([\\`*_{}\[\]()#|!~])", r"\\\1", line)
    # GitHub's markdown makes links of bare addresses too.
    return line.replace("://", ":&#47;&#47;").replace("www.", "www&#46;")


def human(value: Any) -> str:
    """A value as people read it: four significant digits, thousands apart."""
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e6 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def _rows(panel: Table | Facts) -> Sequence[Mapping[str, Any]]:
    if isinstance(panel, Facts):
        return [{"": name, " ": value} for name, value in panel.values.items()]
    return panel.rows


def _markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "none"
    names = list(rows[0])
    lines = [
        "| " + " | ".join(escape_markdown(name) for name in names) + " |",
        "|" + "---|" * len(names),
    ]
    lines += ["| " + " | ".join(escape_markdown(human(r[n])) for n in names) + " |" for r in rows]
    return "\n".join(lines)


def _html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "<p>none</p>"
    names = list(rows[0])
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(human(row[n]))}</td>" for n in names) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
