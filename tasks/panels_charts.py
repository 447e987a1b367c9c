"""Charts as SVG: losses, metrics with intervals, histograms, and the lineage of a model.

Colours are those of the page around them (CSS variables), else the light colours below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from xml.etree import ElementTree as Xml

from tasks.panels import human

INK = "var(--ink, #2b2118)"
PAPER = "var(--paper, #fffdf9)"
LINE = "var(--line, #e4d9cb)"
FAINT = "var(--faint, #b9a794)"
MUTED = "var(--muted, #6f6053)"
TUNED = "var(--tuned, #b5451b)"
OTHER = "var(--other, #2f6391)"
HELD_OUT = "var(--held, #3d7033)"
#: Model -> (colour, name of its mark), so that colour alone carries no meaning.
MODELS = {"base": (MUTED, "circle"), "champion": (OTHER, "square"), "tuned": (TUNED, "diamond")}
#: Colours and dashes of trials: further trials repeat the colours with other dashes.
TRIALS = (TUNED, OTHER, HELD_OUT, MUTED)
DASHES = ("", "7 3", "2 3")
WIDTH = 760
POINTS = 400  # maximum number of points of a line
DECAY = 0.95  # of the running mean

Points = Sequence[tuple[float, float]]
Metrics = Mapping[str, Mapping[str, Mapping[str, Any]]]


class _Drawing:
    """An SVG under construction; it escapes all text."""

    def __init__(self, height: float, alt: str) -> None:
        size = {"viewBox": f"0 0 {WIDTH} {height:g}", "width": str(WIDTH), "height": f"{height:g}"}
        self.root = Xml.Element(
            "svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "aria-label": alt, **size}
        )
        self.root.set("style", "font: 13px system-ui, sans-serif; max-width: 100%; height: auto")
        self.add("rect", f"fill: {PAPER}", width=WIDTH, height=height)

    def add(self, name: str, style: str, **places: float | str) -> Xml.Element:
        values = {k: v if isinstance(v, str) else f"{v:.1f}" for k, v in places.items()}
        return Xml.SubElement(self.root, name, {**values, "style": style})

    def text(self, x: float, y: float, words: str, style: str = "", anchor: str = "start") -> None:
        fill = "" if "fill" in style else f"fill: {INK}; "
        self.add("text", f"{fill}text-anchor: {anchor}; {style}", x=x, y=y).text = words

    def line(self, points: Points, colour: str, width: float, dashes: str = "") -> None:
        style = f"fill: none; stroke: {colour}; stroke-width: {width}; stroke-linejoin: round"
        style += f"; stroke-dasharray: {dashes}" if dashes else ""
        self.add("polyline", style, points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points))

    def mark(self, x: float, y: float, model: str) -> None:
        colour, shape = MODELS[model]
        if shape == "circle":
            self.add("circle", f"fill: {colour}", cx=x, cy=y, r=4.5)
        else:
            turned = {"transform": f"rotate(45 {x:.1f} {y:.1f})"} if shape == "diamond" else {}
            self.add("rect", f"fill: {colour}", x=x - 4, y=y - 4, width=8, height=8, **turned)

    def __str__(self) -> str:
        return Xml.tostring(self.root, encoding="unicode")


@dataclass(frozen=True)
class _Axes:
    """The box of a chart: steps to the right, values upwards."""

    steps: Sequence[float]  # sorted
    low: float  # value at the bottom
    high: float
    top: float  # y of the highest value
    unit: str = "step"  # of what goes to the right
    left = 56
    right = WIDTH - 16
    bottom = 262

    def x(self, step: float) -> float:
        first = self.steps[0]
        last = self.steps[-1]
        return self.left + (self.right - self.left) * (step - first) / ((last - first) or 1)

    def y(self, value: float) -> float:
        part = min(max((value - self.low) / (self.high - self.low), 0), 1)
        return self.bottom - (self.bottom - self.top) * part

    def points(self, steps: Iterable[float], values: Iterable[float]) -> list[tuple[float, float]]:
        return [(self.x(s), self.y(v)) for s, v in zip(steps, values, strict=True)]

    def draw(self, drawing: _Drawing) -> None:
        for part in range(5):
            height = self.bottom - (self.bottom - self.top) * part / 4
            value = self.low + (self.high - self.low) * part / 4
            drawing.line([(self.left, height), (self.right, height)], LINE, 1)
            drawing.text(self.left - 8, height + 4, _tick(value), f"fill: {MUTED}", "end")
        count = len(self.steps) - 1
        ticks = sorted({self.steps[round(part * count / 4)] for part in range(5)})
        for step in ticks:
            anchor = {ticks[0]: "start", ticks[-1]: "end"}.get(step, "middle")
            drawing.text(self.x(step), self.bottom + 18, human(step), f"fill: {MUTED}", anchor)
        middle = (self.left + self.right) / 2
        drawing.text(middle, self.bottom + 34, self.unit, f"fill: {MUTED}", "middle")


def _tick(value: float) -> str:
    """A value beside an axis, in seven characters."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.4g} M"
    return human(value) if abs(value) >= 1000 else f"{value:.3g}"


def loss_chart(history: Sequence[Mapping[str, Any]], chosen: int | None = None) -> str:
    """Loss of each step, its running mean, the held-out loss with its 95% band, learning rate.

    Args:
        history: lines with `step`, `loss`, `learning_rate`, and some with `validation_loss` and
            its standard error `validation_error`.
        chosen: step of the published weights, if a rule chose it.
    """
    lines = [line for line in history if math.isfinite(line["loss"])]
    steps = [line["step"] for line in lines]
    losses = [line["loss"] for line in lines]
    measured = [line for line in lines if "validation_loss" in line]
    held_out = [line["validation_loss"] for line in measured]
    halves = [1.96 * (line.get("validation_error") or 0) for line in measured]
    highs = [loss + half for loss, half in zip(held_out, halves, strict=True)]
    drawing = _Drawing(300, _loss_alt(losses, held_out, chosen))
    if not lines:
        return str(drawing)
    axes = _Axes(steps, 0.0, 1.05 * max(*losses, *highs, 1e-12), top=34)
    axes.draw(drawing)
    if chosen is not None:
        _chosen_line(drawing, axes, chosen)
    rates = [line["learning_rate"] for line in lines]
    of_rates = replace(axes, high=1.05 * max(*rates, 1e-30))
    _curve(drawing, of_rates.points(steps, rates), OTHER, 1)
    _curve(drawing, axes.points(steps, losses), FAINT, 1)
    _curve(drawing, axes.points(steps, running_mean(losses)), TUNED, 2.2)
    names = {"loss": FAINT, "running mean": TUNED, "learning rate (own scale)": OTHER}
    if held_out:
        lows = [loss - half for loss, half in zip(held_out, halves, strict=True)]
        when = [line["step"] for line in measured]
        _band(drawing, *(axes.points(when, values) for values in (lows, held_out, highs)))
        names |= {"held out, 95%": HELD_OUT}
    _legend(drawing, names, axes.left)
    return str(drawing)


def _band(drawing: _Drawing, lows: Points, losses: Points, highs: Points) -> None:
    """The held-out losses as a curve with marks, within their intervals."""
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*highs, *lows[::-1]])
    drawing.add("polygon", f"fill: {HELD_OUT}; opacity: .22", points=points)
    _curve(drawing, losses, HELD_OUT, 2)
    for x, y in losses[:: max(1, len(losses) // 40)]:
        drawing.add("circle", f"fill: {HELD_OUT}", cx=x, cy=y, r=2.6)


def trials_chart(curves: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """A curve per trial of a sweep or source of a mixture, and a legend below.

    Args:
        curves: label -> (step, loss) pairs; the first is drawn widest.
    """
    curves = {label: [p for p in pairs if math.isfinite(p[1])] for label, pairs in curves.items()}
    curves = {label: pairs for label, pairs in curves.items() if pairs}
    alt = "; ".join(f"{label}: {human(pairs[-1][1])}" for label, pairs in curves.items())
    drawing = _Drawing(306 + 20 * len(curves), f"Loss at the end of each curve: {alt or 'none'}")
    if not curves:
        return str(drawing)
    steps = sorted({step for pairs in curves.values() for step, _ in pairs})
    values = [value for pairs in curves.values() for _, value in pairs]
    low = min(values)
    high = max(values)
    room = 0.05 * (high - low or abs(high) or 1)
    axes = _Axes(steps, max(0.0, low - room), high + room, top=14)
    axes.draw(drawing)
    for number, (label, pairs) in enumerate(curves.items()):
        colour = TRIALS[number % len(TRIALS)]
        dashes = DASHES[number // len(TRIALS) % len(DASHES)]
        width = 1.6 if number else 3
        place = 316 + 20 * number
        points = axes.points(*zip(*pairs, strict=True))
        drawing.line(points, colour, width, dashes)
        drawing.add("circle", f"fill: {colour}", cx=points[-1][0], cy=points[-1][1], r=3)
        drawing.line([(axes.left, place), (axes.left + 34, place)], colour, width, dashes)
        drawing.text(axes.left + 42, place + 4, label)
    return str(drawing)


def intervals_chart(metrics: Metrics, lower_is_better: Callable[[str], bool]) -> str:
    """A row per metric: each model's value as a mark, its 95% interval as a whisker.

    Args:
        metrics: metric -> model -> {value, ci: [low, high]}. Each row has its own scale, whose
            ends are written below it.
        lower_is_better: whether a lower value is better; an arrow shows it.
    """
    row = 58
    first = 46
    models = [name for name in MODELS if any(name in by_model for by_model in metrics.values())]
    alt = "; ".join(
        f"{metric}: " + ", ".join(f"{m} {human(float(by_model[m]['value']))}" for m in by_model)
        for metric, by_model in metrics.items()
    )
    drawing = _Drawing(first + row * len(metrics) + 4, f"Metrics with 95% intervals: {alt}")
    for number, name in enumerate(models):
        drawing.mark(230 + 110 * number, 17, name)
        drawing.text(242 + 110 * number, 21, name)
    drawing.text(8, 21, "↑ higher or ↓ lower is better", f"fill: {MUTED}")
    drawing.text(WIDTH - 8, 21, "tuned", f"fill: {MUTED}", "end")
    for number, (metric, by_model) in enumerate(metrics.items()):
        known = {name: by_model[name] for name in models if name in by_model}
        title = f"{metric} {'↓' if lower_is_better(metric) else '↑'}"
        _interval_row(drawing, first + row * number, row, title, known)
    return str(drawing)


def _interval_row(
    drawing: _Drawing, top: float, height: float, title: str, by_model: Mapping[str, Any]
) -> None:
    left = 230
    right = WIDTH - 110
    edges = [float(edge) for m in by_model.values() for edge in (*(m["ci"] or ()), m["value"])]
    known = [edge for edge in edges if math.isfinite(edge)]
    least = min(known, default=0.0)
    most = max(known, default=0.0)
    room = (most - least or abs(most) or 1) * 0.04
    low = least - room
    high = most + room

    def x(value: float) -> float:
        place = min(max((float(value) - low) / (high - low), 0), 1)
        return left + (right - left) * place

    middle = top + height / 2 - 4
    drawing.line([(0, top), (WIDTH, top)], LINE, 1)
    drawing.text(8, middle + 4, title, "font-weight: 600")
    labels = {human(edge): x(edge) for edge in (least, most)}
    for label, place in labels.items() if known else ():
        style = f"fill: {MUTED}; font-size: 10px"
        drawing.text(place, top + height - 4, label, style, "middle")
    tuned = by_model.get("tuned")
    if tuned is not None:
        drawing.text(WIDTH - 8, middle + 4, human(float(tuned["value"])), anchor="end")
    for number, (name, m) in enumerate(by_model.items()):
        y = middle + (number - (len(by_model) - 1) / 2) * 11
        colour = MODELS[name][0]
        ends = m["ci"] or (m["value"], m["value"])  # no interval of one sample
        drawing.line([(x(ends[0]), y), (x(ends[1]), y)], colour, 2)
        for edge in ends:
            drawing.line([(x(edge), y - 4), (x(edge), y + 4)], colour, 2)
        drawing.mark(x(m["value"]), y, name)


def histogram_chart(
    column: str,
    edges: Sequence[float],
    kept: Sequence[int],
    dropped: Sequence[int],
    thresholds: Sequence[tuple[str, float]] = (),
) -> str:
    """Bars of a column's values, those of kept pictures below; a dashed line per threshold.

    Args:
        edges: of the N bins, ascending: N + 1.
        kept, dropped: pictures in each bin.
        thresholds: (operator, value) of the conditions on the column.
    """
    words = ", ".join(f"{operator} {human(value)}" for operator, value in thresholds)
    counts = f"{human(sum(kept))} pictures kept, {human(sum(dropped))} dropped"
    drawing = _Drawing(300, f"{column}: {counts}; thresholds: {words or 'none'}")
    most = max(a + b for a, b in zip(kept, dropped, strict=True))
    axes = _Axes(edges, 0.0, 4.0 * math.ceil(max(most, 1) / 4), top=34, unit=column)
    axes.draw(drawing)
    for start, end, below, above in zip(edges, edges[1:], kept, dropped, strict=False):
        for low, high, colour in ((0, below, OTHER), (below, below + above, FAINT)):
            if high > low:
                width = max(1.0, axes.x(end) - axes.x(start) - 1)
                tall = axes.y(low) - axes.y(high)
                place = {"x": axes.x(start), "y": axes.y(high), "width": width, "height": tall}
                drawing.add("rect", f"fill: {colour}", **place)
    for number, (operator, value) in enumerate(thresholds):
        if edges[0] <= value <= edges[-1]:
            x = axes.x(value)
            drawing.line([(x, axes.top), (x, axes.bottom)], TUNED, 2, "5 4")
            anchor, shift = ("end", -6) if x > WIDTH / 2 else ("start", 6)
            label = f"{operator} {human(value)}"
            drawing.text(x + shift, axes.top + 14 + 16 * number, label, f"fill: {TUNED}", anchor)
    _legend(drawing, {"kept": OTHER, "dropped": FAINT}, axes.left)
    return str(drawing)


@dataclass(frozen=True)
class Node:
    """An artifact or an input in a lineage."""

    title: str
    detail: str
    inputs: tuple[str, ...] = ()  # ids of nodes


def lineage_chart(nodes: Mapping[str, Node]) -> str:
    """Boxes joined by lines: artifacts in a row, from left to right, above their other inputs."""
    columns: dict[int, list[str]] = {}
    for name in sorted(nodes, key=lambda name: not nodes[name].inputs):  # artifacts first
        columns.setdefault(_column(nodes, name), []).append(name)
    rows = max(map(len, columns.values()), default=1)
    wide = (WIDTH - 8) / (max(columns, default=0) + 1)
    tall = 62
    top = 62
    alt = "; ".join(
        f"{node.title} from {', '.join(nodes[i].title for i in node.inputs)}"
        for node in nodes.values()
        if node.inputs
    )
    drawing = _Drawing(top + rows * tall, f"Lineage: {alt}")
    boxes = {
        name: (4 + across * wide, top + 21 + tall * down)
        for across, column in columns.items()
        for down, name in enumerate(column)
    }
    for name, node in nodes.items():
        for parent in node.inputs:
            _join(drawing, boxes[parent], boxes[name], wide)
    for name, node in nodes.items():
        x, y = boxes[name]
        style = f"fill: {PAPER}; stroke: {TUNED if node.inputs else MUTED}; stroke-width: 1.5"
        drawing.add("rect", style, x=x, y=y - 21, width=wide - 26, height=42, rx=7)
        drawing.text(x + 9, y - 3, node.title, "font-weight: 600")
        drawing.text(x + 9, y + 13, node.detail, f"fill: {MUTED}; font-size: 11px")
    return str(drawing)


def _join(drawing: _Drawing, a: tuple[float, float], b: tuple[float, float], wide: float) -> None:
    """A line to the next column, or an arc above the columns between."""
    box = wide - 26
    if b[0] - a[0] < 1.5 * wide:
        x = a[0] + box
        bend = (b[0] - a[0] - box) / 2
        points = [(x, a[1]), (x + bend, a[1]), (b[0] - bend, b[1]), b]
    else:
        start = (a[0] + box * 0.6, a[1] - 21)
        end = (b[0] + box * 0.4, b[1] - 21)
        high = min(start[1], end[1]) - 14 * (b[0] - a[0]) / wide
        points = [start, (start[0], high), (end[0], high), end]
    first, *rest = (f"{across:.1f},{down:.1f}" for across, down in points)
    style = f"fill: none; stroke: {FAINT}; stroke-width: 1.5"
    drawing.add("path", style, d=f"M{first} C{' '.join(rest)}")


def _column(nodes: Mapping[str, Node], name: str) -> int:
    """The column of a node: after its inputs; an input from elsewhere stands before its use."""
    if nodes[name].inputs:
        return _depth(nodes, name)
    uses = [_depth(nodes, other) for other, node in nodes.items() if name in node.inputs]
    return min(uses, default=1) - 1


def _depth(nodes: Mapping[str, Node], name: str) -> int:
    return max((1 + _depth(nodes, parent) for parent in nodes[name].inputs), default=0)


def running_mean(values: Sequence[float]) -> list[float]:
    """Exponential mean with Adam's bias correction."""
    means = []
    mean = 0.0
    for count, value in enumerate(values, start=1):
        mean = DECAY * mean + (1 - DECAY) * value
        means.append(mean / (1 - DECAY**count))
    return means


def _curve(drawing: _Drawing, points: Points, colour: str, width: float) -> None:
    stride = max(1, len(points) // POINTS)
    drawing.line([*points[::stride], points[-1]], colour, width)


def _legend(drawing: _Drawing, names: Mapping[str, str], left: float) -> None:
    for number, (name, colour) in enumerate(names.items()):
        x = left + (0, 80, 210, 420)[number]
        drawing.line([(x, 15), (x + 20, 15)], colour, 3)
        drawing.text(x + 26, 19, name)


def _chosen_line(drawing: _Drawing, axes: _Axes, step: int) -> None:
    """A dashed line at the step of the published weights."""
    x = axes.x(step)
    style = f"fill: none; stroke: {INK}; stroke-width: 1; stroke-dasharray: 4 3"
    ends = f"{x:.1f},{axes.top:.1f} {x:.1f},{axes.bottom:.1f}"
    drawing.add("polyline", style, points=ends)
    anchor, shift = ("end", -6) if x > WIDTH / 2 else ("start", 6)
    drawing.text(x + shift, axes.top + 32, f"chosen: step {human(step)}", anchor=anchor)


def _loss_alt(losses: Sequence[float], held_out: Sequence[float], chosen: int | None) -> str:
    if not losses:
        return "Loss: no step"
    text = f"Loss over {len(losses)} steps, from {human(losses[0])} to {human(losses[-1])}"
    if held_out:
        text += f"; held-out loss from {human(held_out[0])} to {human(held_out[-1])}"
    return text if chosen is None else f"{text}; chosen: step {human(chosen)}"
