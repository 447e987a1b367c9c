"""`report.html`: the output of every stage on one self-contained page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from artifacts.store import Artifact
from configs.load import dump
from configs.recipe import Recipe
from tasks.build_or_reuse import StageResult
from tasks.panels import Panel, render_html

NAME = "report.html"


def page(
    recipe: Recipe,
    stages: Sequence[tuple[Artifact, StageResult]],
    shows: Mapping[str, Callable[[Artifact], list[Panel]]],
) -> str:
    """The HTML page, with all external text escaped.

    Args:
        stages: artifact and result of each stage, in the order of the flow.
        shows: stage name -> function that returns the panels of its artifact.
    """
    sections = [
        {
            "name": artifact.stage,
            "outcome": result.outcome,
            "key": artifact.key[:12],
            "panels": shows[artifact.stage](artifact),
        }
        for artifact, result in stages
    ]
    return render_html(
        "publish/report.html.jinja",
        name=recipe.publish.name,
        description=recipe.description,
        stages=sections,
        recipe=dump(recipe),
    )
