"""`report.html`: the output of every stage on one self-contained page."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from artifacts.store import Artifact
from configs.load import dump
from configs.recipe import Recipe
from configs.redact_urls import without_secrets
from tasks.build_or_reuse import StageResult
from tasks.panels import Facts, Panel, render_html

NAME = "report.html"
log = logging.getLogger("kiln")


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
            "panels": _panels(artifact, shows),
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


def _panels(
    artifact: Artifact, shows: Mapping[str, Callable[[Artifact], list[Panel]]]
) -> list[Panel]:
    """The panels of a stage's artifact; an error, such as of an odd picture, is shown instead."""
    try:
        return shows[artifact.stage](artifact)
    except Exception as error:
        reason = without_secrets(repr(error))
        log.warning("%s: %s is not shown: %s", NAME, artifact.stage, reason)
        return [Facts("Not shown", {"error": reason})]
