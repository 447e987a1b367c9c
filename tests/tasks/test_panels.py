"""Panels escape external text."""

import base64
import re
from io import BytesIO

import numpy as np
from PIL import Image

from tasks.panels import SMALL, Facts, Panel, Picture, Table, render_html, to_markdown

HOSTILE = "<script>alert(1)</script> [x](javascript:1) | ![p](http://x/y) `a`\n# h"


def to_html(panels: list[Panel]) -> str:
    """The panels as the report includes them."""
    return render_html("panels.html.jinja", panels=panels)


def test_hostile_text_is_escaped_in_markdown() -> None:
    text = to_markdown("h", [Table("t", [{"caption": HOSTILE}]), Facts("f", {HOSTILE: 1})])
    assert "<script" not in text
    assert "](javascript" not in text
    assert "](http" not in text
    assert "\n# h" not in text
    assert all(line.count(" | ") <= 1 for line in text.splitlines())


def test_hostile_text_is_escaped_in_html() -> None:
    text = to_html([Table(HOSTILE, [{"caption": HOSTILE}])])
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_pictures_are_pictures_in_both() -> None:
    picture = Picture("grid", b"\x89PNG")
    assert "![grid](data:image/png;base64,iVBORw==)" in to_markdown("h", [picture])
    assert '<img src="data:image/png;base64,iVBORw=="' in to_html([picture])


def test_a_large_picture_is_small_in_markdown_and_whole_in_html() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (600, 400, 3), np.uint8)
    Image.fromarray(noise).save(buffer := BytesIO(), "PNG")
    picture = Picture("grid", buffer.getvalue())
    assert len(picture.png) > 2 * SMALL
    (kind, data) = re.findall(r"data:image/(\w+);base64,([^)]+)\)", to_markdown("h", [picture]))[0]
    seen = Image.open(BytesIO(base64.b64decode(data)))
    assert len(base64.b64decode(data)) <= SMALL and kind == "jpeg"
    assert seen.height > seen.width > 100
    assert base64.b64encode(picture.png).decode() in to_html([picture])


def test_an_empty_table_is_none() -> None:
    assert "none" in to_markdown("h", [Table("t", [])])
    assert "none" in to_html([Table("t", [])])
