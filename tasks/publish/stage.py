"""The publish stage: through the gate, into a diffusers folder, into the registry."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from artifacts.store import Artifact, Draft
from configs.load import dump
from configs.schema import Recipe
from runtimes.adapters.lora import read_adapters
from tasks.evaluate.measure import flatten
from tasks.panels import Facts, Panel, Picture, Table
from tasks.progress import Progress
from tasks.publish import card, gate
from tasks.publish.adapters import write_adapters
from tasks.publish.assemble import assemble
from tasks.publish.registry import Registry, Version
from tasks.tuned import TrainedWeights, local_weights

STAGE = "publish"
VERSION = 1


class Rejected(Exception):
    """The gate did not let the model through; `verdicts` says why."""

    def __init__(self, verdicts: list[gate.Verdict]) -> None:
        self.verdicts = verdicts
        failed = [_in_words(v) for v in verdicts if not v.passed]
        super().__init__("the gate refused the model: " + "; ".join(failed))


def settings_for_key(recipe: Recipe) -> dict[str, Any]:
    """The settings that change what is published."""
    return recipe.publish.model_dump(mode="json", exclude={"registry"})


def registry_of(recipe: Recipe) -> Registry:
    """The registry that a recipe publishes to."""
    url = recipe.publish.registry or f"{recipe.store.rstrip('/')}/registry"
    return Registry(url, recipe.publish.name)


def build(
    recipe: Recipe,
    trained: Artifact,
    evaluated: Artifact,
    lineage: dict[str, str],
    base: Path,
    vae: Path | None,
    champion_metrics: Callable[[Version], dict[str, Any]],
    draft: Draft,
    progress: Progress,
) -> dict[str, Any]:
    """Judge, then put the folder together. Raises Rejected, and leaves nothing, if a rule fails.

    `champion_metrics(version)` gives a version's metrics as measured the way `evaluated` was.
    """
    measured = json.loads(evaluated.read("metrics.json"))
    champion = registry_of(recipe).champion()
    verdicts = _judge(recipe, measured["metrics"], champion, champion_metrics)
    progress(1, 3, "gate passed")
    with (
        tempfile.TemporaryDirectory(prefix="kiln-publish-") as scratch,
        local_weights(trained) as tuned,
    ):
        out = Path(scratch) / "model"
        _put_together(recipe, tuned, base, vae, out)
        facts = card.Weights.of(tuned, merged=recipe.publish.merge)
        text = card.write_card(recipe, base, measured["metrics"], verdicts, lineage, facts)
        (out / "README.md").write_text(text, encoding="utf-8")
        (out / "recipe.yaml").write_text(dump(recipe), encoding="utf-8")
        (out / "metrics.json").write_bytes(evaluated.read("metrics.json"))
        (out / "before_after.png").write_bytes(evaluated.read("before_after.png"))
        (out / "gate.json").write_text(json.dumps([vars(v) for v in verdicts], indent=1))
        progress(2, 3, "copying")
        for path in sorted(p for p in out.rglob("*") if p.is_file()):
            draft.upload(str(path), str(path.relative_to(out)))
    progress(3, 3, "published")
    return {
        "name": recipe.publish.name,
        "license": card.license_of(recipe, base),
        "lineage": lineage,
        "compared_with": champion.name if champion else None,
    }


def _judge(
    recipe: Recipe,
    metrics: dict[str, Any],
    champion: Version | None,
    champion_metrics: Callable[[Version], dict[str, Any]],
) -> list[gate.Verdict]:
    values = flatten(metrics)
    if champion is not None and gate.needs_champion(recipe.publish.gate):
        for name, models in champion_metrics(champion).items():
            if "tuned" in models:
                values.setdefault(name, {})["champion"] = models["tuned"]["value"]
    verdicts = gate.judge(recipe.publish.gate, values, champion=champion is not None)
    if not all(v.passed for v in verdicts):
        raise Rejected(verdicts)
    return verdicts


def _put_together(
    recipe: Recipe, tuned: TrainedWeights, base: Path, vae: Path | None, out: Path
) -> None:
    """The weights: a pipeline's folder; adapters alone; or one with them merged, and them in it."""
    dtype, lora = recipe.publish.dtype, tuned.lora
    alone = lora is not None and not recipe.publish.merge
    if not alone:
        instead = tuned.parts | ({} if vae is None else {"vae": vae})
        adapters = None if lora is None else read_adapters(lora)
        assemble(base, instead, out, dtype=dtype, adapters=adapters)
    if lora is not None:
        write_adapters(
            lora,
            base,
            out if alone else out / "lora",
            name=recipe.publish.name,
            dtype=dtype,
            scheduler=tuned.parts.get("scheduler"),
        )


def show(artifact: Artifact) -> list[Panel]:
    """The gate's verdicts, the before/after picture, the metrics, and the lineage."""
    metrics = json.loads(artifact.read("metrics.json"))["metrics"]
    verdicts = [gate.Verdict(**v) for v in json.loads(artifact.read("gate.json"))]
    summary = artifact.summary
    about = {"where": artifact.uri, "licence": summary["license"], **summary["lineage"]}
    return [
        Facts("Model", about),
        Table("Gate", gate.as_rows(verdicts)),
        Picture("Before (above) and after (below)", artifact.read("before_after.png")),
        Table("Metrics (95% confidence interval)", card.metric_rows(metrics)),
    ]


def _in_words(verdict: gate.Verdict) -> str:
    if verdict.value is None or verdict.bound is None:
        return f"{verdict.rule} ({verdict.note})"
    return f"{verdict.rule} (measured {verdict.value:.4g}, bound {verdict.bound:.4g})"
