"""Panels escape external text."""

import base64
import re
from io import BytesIO

import pytest
from picture_bytes import noise_picture
from picture_server import picture
from PIL import Image

from tasks.panels import (
    LARGE_SUM,
    SMALL,
    Chart,
    Comparison,
    Facts,
    Panel,
    PicturePanel,
    Strip,
    Table,
    human,
    render_html,
    to_markdown,
)

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
    picture = PicturePanel("grid", b"\x89PNG")
    assert "![grid](data:image/png;base64,iVBORw==)" in to_markdown("h", [picture])
    assert '<img src="data:image/png;base64,iVBORw=="' in to_html([picture])
    svg = Chart("loss", "<svg/>")
    assert "![loss](data:image/svg+xml;base64,PHN2Zy8+)" in to_markdown("h", [svg])
    assert "<svg/>" in to_html([svg])


def test_a_large_picture_is_small_in_markdown_and_whole_in_html() -> None:
    picture = PicturePanel("grid", noise_picture(0, 400, 500))
    assert len(picture.png) > 2 * SMALL
    (kind, data) = re.findall(r"data:image/(\w+);base64,([^)]+)\)", to_markdown("h", [picture]))[0]
    seen = Image.open(BytesIO(base64.b64decode(data)))
    assert len(base64.b64decode(data)) <= SMALL and kind == "webp"
    assert seen.height > seen.width > 100
    assert base64.b64encode(picture.png).decode() in to_html([picture])


def test_a_strip_has_every_picture_in_html_and_the_last_in_markdown() -> None:
    strip = Strip("samples", [(f"step {n}", picture(n)) for n in range(3)])
    html, text = to_html([strip]), to_markdown("h", [strip])
    assert all(base64.b64encode(png).decode() in html for _, png in strip.pictures)
    assert html.count(" hidden>") == 2 and 'max="2" value="2" aria-valuetext="step 2"' in html
    assert text.count("](data:") == 1 and base64.b64encode(picture(2)).decode() in text


def test_a_comparison_has_each_models_picture_in_html_and_the_grid_in_markdown() -> None:
    models = ("base", "champion", "tuned")
    rows = [(HOSTILE, [picture(n) for n in (1, 2, 3)])]
    comparison = Comparison("pictures", models, rows, grid=picture(9))
    html, text = to_html([comparison]), to_markdown("h", [comparison])
    shown = re.findall(r'base64,([^"]+)" alt="(\w+): [^"]*"([^>]*)>', html)
    assert [base64.b64decode(data) for data, *_ in shown] == rows[0][1]
    assert [model for _, model, _ in shown] == list(models)
    assert [kind.strip() for *_, kind in shown] == ['class="left"', "hidden", 'class="right"']
    assert "<script>alert" not in html
    assert base64.b64encode(picture(9)).decode() in text


@pytest.mark.slow
def test_pictures_of_one_panel_share_a_limit() -> None:
    noise = noise_picture(0, 160, 160)
    strip = Strip("samples", [("step", noise)] * 24)
    rows = [("prompt", [noise] * 3)] * 20
    comparison = Comparison("pictures", ("base", "champion", "tuned"), rows, grid=b"")
    for panel in (strip, comparison):
        assert len(to_html([panel])) < LARGE_SUM * 4 / 3 + 50_000


def test_bars_are_shares_of_the_largest_number() -> None:
    html = to_html([Table("t", [{"n": 4}, {"n": 1}], bars="n")])
    assert re.findall(r"--share: ([\d.]+)%", html) == ["100.0", "25.0"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0.123456, "0.1235"), (9999.4, "9,999"), (9999.6, "10,000"), (12345.6, "12,346")),
        *(
            (-12345.6, "-12,346"),
            (999999.0, "999,999"),
            (1234567.0, "1,234,567"),
            (12345, "12,345"),
        ),
    ],
)
def test_numbers_for_people_have_no_exponent(value: float, text: str) -> None:
    assert human(value) == text


def test_an_empty_table_is_none() -> None:
    assert "none" in to_markdown("h", [Table("t", [])])
    assert "none" in to_html([Table("t", [])])
