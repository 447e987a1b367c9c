"""Charts of the loss, of metrics with intervals and of the lineage."""

from typing import Any
from xml.etree import ElementTree

from tasks.panels_charts import (
    HELD_OUT,
    OTHER,
    TUNED,
    Node,
    histogram_chart,
    intervals_chart,
    lineage_chart,
    loss_chart,
)

HOSTILE = "<script>alert(1)</script>"
LINES: list[dict[str, Any]] = [
    {"step": n, "loss": 1.0 / n, "learning_rate": 1e-3} for n in range(1, 9)
]
Points = list[tuple[float, float]]


def shapes(svg: str, name: str, colour: str) -> list[ElementTree.Element]:
    found = ElementTree.fromstring(svg).iter(f"{{http://www.w3.org/2000/svg}}{name}")
    return [one for one in found if colour in one.get("style", "")]


def line(svg: str, colour: str) -> Points:
    (found,) = shapes(
        svg, "polyline", f"stroke: {colour}; stroke-width: {1 if colour == OTHER else 2}"
    )
    return points(found)


def points(shape: ElementTree.Element) -> Points:
    pairs = (pair.split(",") for pair in shape.get("points", "").split())
    return [(float(x), float(y)) for x, y in pairs]


def falls(drawn: Points) -> bool:
    return drawn[0][0] < drawn[-1][0] and drawn[0][1] < drawn[-1][1] - 20  # y points down


def test_the_loss_chart_has_the_running_mean_and_the_learning_rate() -> None:
    svg = loss_chart(LINES)
    assert falls(line(svg, TUNED))
    heights = {y for _, y in line(svg, OTHER)}
    assert len(heights) == 1, "the rate stays"
    assert not shapes(svg, "polygon", HELD_OUT)


def test_the_axis_of_a_histogram_counts_whole_pictures() -> None:
    svg = histogram_chart("score", [0.1, 0.2, 0.3], [3, 1], [2, 0])
    texts = [e.text for e in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert texts[:5] == ["0", "2", "4", "6", "8"], "five pictures are the most"


def test_the_held_out_loss_has_its_band() -> None:
    held = [{"validation_loss": 0.9, "validation_error": 0.05}]
    held += [{"validation_loss": 0.3, "validation_error": None}]  # of one sample
    svg = loss_chart([LINES[0] | held[0], LINES[1], LINES[2] | held[1], *LINES[3:]])
    assert falls(line(svg, HELD_OUT))
    (band,) = shapes(svg, "polygon", HELD_OUT)
    high, low = sorted(points(band))[:2]
    height_of_one = 228 / (1.05 * 1.0)
    assert abs(abs(low[1] - high[1]) - 2 * 1.96 * 0.05 * height_of_one) < 0.5


def test_a_run_without_finite_losses_has_an_empty_chart() -> None:
    assert "no step" in loss_chart([])
    assert "no step" in loss_chart([{"step": 1, "loss": float("nan"), "learning_rate": 0.0}])


def test_whiskers_have_the_ends_of_the_interval_and_each_model_its_mark() -> None:
    metrics = {
        HOSTILE: {
            "base": {"value": 1.0, "ci": [0.0, 2.0]},
            "tuned": {"value": 3.0, "ci": [2.5, 4.0]},
        }
    }
    svg = intervals_chart(metrics, lambda name: name == HOSTILE)
    assert "<script" not in svg and "tuned 3" in svg and "↓</text>" in svg
    assert "↑</text>" in intervals_chart(metrics, lambda name: False)
    (whisker, *ends) = shapes(svg, "polyline", f"stroke: {TUNED}")
    (left, _), (right, _) = points(whisker)
    assert [points(end)[0][0] for end in ends] == [left, right]
    _, mark = shapes(svg, "rect", TUNED)  # the first is in the legend
    scale = {one.text: float(one.get("x", "")) for one in shapes(svg, "text", "10px")}
    assert scale.keys() == {"0", "4"} and abs(scale["4"] - right) < 0.1
    middle = float(mark.get("x", "")) + 4
    assert abs((middle - left) / (right - left) - 0.5 / 1.5) < 0.01
    assert mark.get("transform", "").startswith("rotate(45")


def test_metrics_without_spread_and_with_infinite_values_are_drawn() -> None:
    same = {"value": 1.0, "ci": [1.0, 1.0]}
    odd = {"value": 0.0, "ci": [float("-inf"), float("inf")]}
    metrics = {"a": {"base": same, "tuned": same}, "b": {"tuned": odd}}
    assert "NaN" not in intervals_chart(metrics, lambda name: True)
    assert intervals_chart({}, lambda name: True)


def test_the_lineage_runs_from_inputs_on_the_left() -> None:
    nodes = {
        "a": Node("source", HOSTILE),
        "b": Node("download", "1", ("a",)),
        "c": Node("publish", "2", ("b", "a")),
    }
    svg = lineage_chart(nodes)
    drawn = shapes(svg, "rect", "stroke")  # in the order of the nodes
    lefts = [float(box.get("x", "")) for box in drawn]
    assert len(lefts) == 3 and lefts[0] < lefts[1] < lefts[2]
    assert len(shapes(svg, "path", "stroke")) == 3
    assert "<script" not in svg and "publish from download, source" in svg
