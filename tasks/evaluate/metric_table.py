"""Metrics as table rows for the Prefect UI, the report and the model card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.evaluate.bootstrap import Metric
from tasks.panels import human

MODELS = ("base", "tuned", "champion")


def metric_rows(
    metrics: Mapping[str, Mapping[str, Metric]],
    differences: Mapping[str, Mapping[str, Metric]],
) -> list[dict[str, Any]]:
    """Table rows, one per metric: value of each model, and the differences, with 95% intervals.

    Args:
        metrics: metric name -> model -> metric.
        differences: metric name -> other model -> {"value", "ci"} of tuned - other.
    """
    measured = [model for model in MODELS if any(model in models for models in metrics.values())]
    others = [model for model in measured if any(model in one for one in differences.values())]
    return [
        {
            "metric": name,
            **{model: with_interval(models.get(model)) for model in measured},
            **{
                f"tuned - {model}": with_interval(differences.get(name, {}).get(model))
                for model in others
            },
            "samples": models["tuned"]["n"],
        }
        for name, models in metrics.items()
    ]


def with_interval(metric: Metric | None) -> str:
    """A metric and its interval, if there is one, as text; a dash if it was not measured."""
    if metric is None:
        return "—"
    if metric["ci"] is None:
        return human(float(metric["value"]))
    low, high = metric["ci"]
    return f"{human(float(metric['value']))} [{human(float(low))}, {human(float(high))}]"
