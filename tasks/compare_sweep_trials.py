"""Trials of a sweep: comparability, the best, and their table and curves for people."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from artifacts.store import Artifact
from configs.errors import Failed, Refused
from configs.settings.recipe import Recipe, Sweep
from configs.settings.train_parts import HOLDOUT_LOSS
from runtimes.objective.noise_schedule import schedule_facts
from runtimes.pipeline_folder.folder import Base
from tasks.evaluate.metrics import hint_of_metric, lower_is_better, metric_names, with_interval
from tasks.panels import Chart, Facts, Panel, Table, aligned
from tasks.panels_charts import running_mean, trials_chart

STAGE = "sweep"
POINTS = 60  # maximum number of points of a trial's curve
BARS = "▁▂▃▄▅▆▇█"
#: A trial in the report: `label`, `settings`, `status` (measured | failed), `error` (None if
#: measured), `metrics` (name -> {value, ci, n}), `curve` ((step, loss) pairs) and `stages`.
Outcome = Mapping[str, Any]


def check_metric(recipe: Recipe, *, held_out: int = 2) -> None:
    """Raise Refused if `sweep.metric` is not measured.

    Args:
        held_out: as of metric_names.
    """
    metric = recipe.sweep.metric
    known = metric_names(recipe, held_out=held_out)
    if metric not in known:
        raise Refused(f"sweep.metric: {metric} is not measured ({hint_of_metric(metric, known)})")


def check_comparable(recipes: Sequence[Recipe], base: Base) -> None:
    """Raise Refused if `sweep.metric` is a held-out loss that trials define differently."""
    metric = recipes[0].sweep.metric
    if not metric.startswith(HOLDOUT_LOSS):
        return
    trains = [recipe.train for recipe in recipes]
    losses = [(t.holdout_loss_inputs, schedule_facts(base.schedule(t))) for t in trains]
    if any(loss != losses[0] for loss in losses):
        raise Refused(
            f"sweep.metric: {metric} of trials with another prediction_type, zero_terminal_snr, "
            "noise_offset or guidance_scale is not comparable: set a metric of pictures, such as "
            "cmmd"
        )


def read_curve(trained: Artifact) -> list[tuple[int, float]]:
    """(step, held-out loss) of a training; without a held-out loss, the running mean of its loss.

    At most POINTS pairs, the last step among them.
    """
    lines = [json.loads(line) for line in trained.read("history.jsonl").splitlines()]
    held_out = [(n["step"], n["validation_loss"]) for n in lines if "validation_loss" in n]
    means = running_mean([line["loss"] for line in lines])
    pairs = held_out or [(n["step"], mean) for n, mean in zip(lines, means, strict=True)]
    return pairs[:: -max(1, -(-len(pairs) // POINTS))][::-1]


def mode_of(sweep: Sweep) -> str:
    """Best value of the metric: min or max."""
    return sweep.mode or ("min" if lower_is_better(sweep.metric) else "max")


def tuned_metrics(metrics: Mapping[str, Any], sweep: Sweep) -> dict[str, Any]:
    """Metric name -> result of the tuned model.

    Args:
        metrics: metric name -> results by model.

    Raises:
        Failed: `sweep.metric` was not measured.
    """
    tuned = {name: models["tuned"] for name, models in metrics.items() if "tuned" in models}
    if sweep.metric not in tuned:
        raise Failed(f"sweep: {sweep.metric} was not measured")
    return tuned


def choose_best(trials: Sequence[Outcome], sweep: Sweep) -> int | None:
    """The number of the measured trial with the best metric, the first among equals; or None."""
    return next(iter(_best_first(trials, sweep)), None)


def _best_first(trials: Sequence[Outcome], sweep: Sweep) -> list[int]:
    sign = 1 if mode_of(sweep) == "min" else -1
    measured = [n for n, trial in enumerate(trials) if trial["status"] == "measured"]
    return sorted(measured, key=lambda n: sign * trials[n]["metrics"][sweep.metric]["value"])


def show(trials: Sequence[Outcome], sweep: Sweep, facts: Mapping[str, Any]) -> list[Panel]:
    """The table of all trials, best first, their curves, and all metrics.

    Args:
        facts: about the sweep, such as the number of trials and the published model.
    """
    order = _best_first(trials, sweep)
    measured = {trials[n]["label"]: trials[n] for n in order}
    names = dict.fromkeys(name for trial in measured.values() for name in trial["metrics"])
    metrics = [
        {"metric": name}
        | {label: with_interval(trial["metrics"].get(name)) for label, trial in measured.items()}
        for name in names
    ]
    chart = trials_chart({label: trial["curve"] for label, trial in measured.items()})
    return [
        Facts("Sweep", facts),
        Table("Trials", rows(trials, sweep)),
        Chart("Loss of each trial", chart),
        Table("Metrics, with 95% confidence intervals", metrics),
    ]


def rows(trials: Sequence[Outcome], sweep: Sweep) -> list[dict[str, Any]]:
    """Table rows: values, metric and outcome of each trial, the best first, failed trials last."""
    order = _best_first(trials, sweep)
    failed = [n for n in range(len(trials)) if n not in order]
    return [
        {
            "trial": number + 1,
            **{name: json.dumps(value) for name, value in trials[number]["settings"].items()},
            sweep.metric: with_interval(trials[number]["metrics"].get(sweep.metric)),
            "outcome": "best" if number in order[:1] else trials[number]["error"] or "measured",
        }
        for number in [*order, *failed]
    ]


def terminal_lines(trials: Sequence[Outcome], sweep: Mapping[str, Any]) -> Iterable[str]:
    """The table for a terminal, with the curve of each trial on a common scale.

    Args:
        sweep: the section `sweep`, dumped.
    """
    table = rows(trials, Sweep(**sweep))
    for row in table:
        curve = trials[row["trial"] - 1]["curve"]
        row |= {"loss": _sparkline(curve, trials), "outcome": row.pop("outcome")}
    return aligned(table)


def _sparkline(curve: Sequence[tuple[int, float]], trials: Sequence[Outcome]) -> str:
    """A bar per point, at most 24 of them."""
    curve = [(step, value) for step, value in curve if math.isfinite(value)]
    every = [value for trial in trials for _, value in trial["curve"]]
    values = [value for value in every if math.isfinite(value)]
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    scale = (len(BARS) - 1) / (high - low or 1.0)
    chosen = curve[:: -max(1, -(-len(curve) // 24))][::-1]
    return "".join(BARS[round((value - low) * scale)] for _, value in chosen)
