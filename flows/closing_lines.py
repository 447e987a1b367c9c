"""The last lines of a run: its metrics, where its result is, and the commands to go on with."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from typing import Any

from configs.settings.generate import Generate
from configs.settings.recipe import Recipe
from tasks.stage import GRID, REPORT


def closing_lines(report: dict[str, Any]) -> Iterator[str]:
    """What a report says in words: changes of the source, trials, metrics, and the outcome."""
    if "changes" in report:
        yield from _changes(report)
    if "trials" in report:
        from tasks.compare_sweep_trials import terminal_lines

        yield from terminal_lines(report["trials"], report["sweep"])
    for name, models in report["metrics"].items():
        values = (f"{model} {found['value']:<10.4g}" for model, found in models.items())
        yield f"  {name:24} {' '.join(values)}".rstrip()
    if report["status"] == "rejected":
        failed = [rule["rule"] for rule in report["gate"] if not rule["passed"]]
        yield f"rejected by the gate: {'; '.join(failed)}"
        yield f"verdict:   {report['verdict']['uri']}"
        yield f"pictures:  {report['stages']['evaluate']['uri']}/{GRID}"
    elif report["status"] == "unchanged":
        yield f"unchanged: {report['why']}"
    elif report["status"] == "built":
        for name, stage in report["stages"].items():
            yield f"{name:9} {stage['outcome']}: {stage['uri']}"
    else:
        yield f"published: {report['model']}{_other_champion(report)}"
        yield f"report:    {report['model']}/{REPORT}"


def next_commands(report: dict[str, Any], recipe: Recipe, *, has_server: bool) -> Iterator[str]:
    """The commands that draw with a published model, make it the champion, and show its run.

    Args:
        has_server: whether a Prefect server shows the run already.
    """
    if report["status"] != "published":
        return
    kiln = "kiln" if shutil.which("kiln") else ".venv/bin/kiln"
    prompts = (one.prompts[0] for one in recipe.evaluate.prompts.values() if one.prompts)
    words = [kiln, "generate", _name_for_generate(report, recipe), next(prompts, "a prompt")]
    yield f"next:      {shlex.join(words)}"
    if _other_champion(report):
        version = report["model"].rpartition("/")[2]
        words = [kiln, "promote", recipe.publish.name, version, *_place(recipe)]
        yield f"           {shlex.join(words)}   # makes it the champion"
    if not has_server:
        yield "           make ui   # this run in a browser"


def _name_for_generate(report: dict[str, Any], recipe: Recipe) -> str:
    """The model's name where that is enough: in the default store, as the champion."""
    return report["model"] if _place(recipe) or _other_champion(report) else recipe.publish.name


def _place(recipe: Recipe) -> list[str]:
    """The options that name a recipe's registry; none for that of the default store."""
    if recipe.publish.registry is not None:
        return ["--registry", recipe.publish.registry]
    is_default = recipe.store == Generate.model_fields["store"].default
    return [] if is_default else ["--store", recipe.store]


def _changes(report: dict[str, Any]) -> Iterator[str]:
    found = report["changes"]
    yield (
        f"source:    {found['rows']:,} rows, {found['new_rows']:,} new and "
        f"{found['removed_rows']:,} removed since {report['start'] or 'no champion'}; "
        f"{found['kept_shards']:,} shards reused, {found['new_shards']:,} to build"
    )
    if "samples" in report:
        samples = report["samples"]
        yield (
            f"training:  {samples['steps']:,} steps on {samples['new']:,} new and "
            f"{samples['replayed']:,} old samples"
        )


def _other_champion(report: dict[str, Any]) -> str:
    """The champion if it is not this run's model, for example after a rollback; else empty."""
    move, version = report["champion"], report["model"].rpartition("/")[2]
    if move is None or move["version"] == version:
        return ""
    return f"; the champion is {move['version']} ({move['why']})"
