"""The publish stage: gate, diffusers folder, registry.

The lineage of a published model is its artifacts and their inputs, as nodes of a graph.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from artifacts.models import digest_model
from artifacts.records import digest_bytes, digest_json
from artifacts.store import Artifact, Draft, KeyParts
from configs.errors import Away, Failed
from configs.load_recipe import dump_yaml
from configs.settings.recipe import Recipe
from runtimes.adapters.lora import read_adapters
from runtimes.pipeline_folder.folder import Base
from tasks.evaluate.distances import Estimates, differences
from tasks.evaluate.draw import DRAWING_PARTS
from tasks.evaluate.published import PublishedMetrics
from tasks.evaluate.stage import metrics_by_name, read_estimates
from tasks.panels import Chart, Facts, Panel, Table
from tasks.panels_charts import Node, lineage_chart
from tasks.progress import Progress
from tasks.publish import model_card, promotion_gate, smoke_test
from tasks.publish.assemble import assemble, write_adapters
from tasks.publish.model_card import published_settings
from tasks.publish.registry import Registry, Version, registry_url
from tasks.stage import BOOTSTRAP, GATE, GRID, METRICS, RECIPE, TrainedWeights, local_weights

#: Input -> its title, where an input is no artifact of the store.
TITLES = {"source": "source", "encoders": "encoders", "base": "base model", "clip": "judge: CLIP"}

CHAMPION_EVALUATION = "champion_evaluation"  # a parent's name


def lineage_nodes(artifact: Artifact) -> dict[str, Node]:
    """Id -> node of an artifact and everything it was made from, as far as the store has it."""
    nodes: dict[str, Node] = {}
    _add(artifact, nodes)
    return nodes


def _add(artifact: Artifact, nodes: dict[str, Node]) -> str:
    if artifact.key in nodes:
        return artifact.key
    parents = artifact.manifest["run"].get("parents", {})
    inputs = []
    for name, digest in sorted(artifact.manifest["inputs"].items()):
        parent = parents.get(name)
        found = artifact.store.load(parent["stage"], parent["key"]) if parent else None
        if found is not None:
            inputs.append(_add(found, nodes))
        elif parent is not None or name in TITLES:
            # One box per input and digest: training and evaluation may read other parts of a base.
            leaf = f"{name} {digest}"
            nodes.setdefault(leaf, Node(TITLES.get(name, name), digest[:12]))
            inputs.append(leaf)
    if (champion := remeasured_champion(artifact)) is not None:
        inputs.append(_add(champion, nodes))
    nodes[artifact.key] = Node(artifact.stage, artifact.digest[:12], tuple(dict.fromkeys(inputs)))
    return artifact.key


def remeasured_champion(artifact: Artifact) -> Artifact | None:
    """The evaluation of the champion that a published model was compared with.

    It is no input, since only the build finds whether the champion must be measured again.
    """
    parent = artifact.manifest["run"].get("parents", {}).get(CHAMPION_EVALUATION)
    return artifact.store.load(parent["stage"], parent["key"]) if parent else None


STAGE = "publish"
VERSION = 3
log = logging.getLogger("kiln")


@dataclass(frozen=True)
class Publication:
    """A trained model to publish, and what it was made from."""

    recipe: Recipe
    trained: Artifact
    evaluated: Artifact
    lineage: dict[str, str]  # input name -> digest, for the card
    base: Base
    #: The reason to publish a model that fails a rule; the card and the history name it.
    force: str | None = None


class Rejected(Failed):
    """The model failed a rule of the gate; `verdicts` has all results.

    Args:
        measured: content of metrics.json.
        compared_with: the champion's version.
        champion_evaluation: the champion's evaluation if it was measured again.
    """

    def __init__(
        self,
        verdicts: list[promotion_gate.Verdict],
        measured: Mapping[str, Any] | None = None,
        compared_with: str | None = None,
        champion_evaluation: Artifact | None = None,
    ) -> None:
        self.verdicts = verdicts
        self.measured = dict(measured or {})
        self.compared_with = compared_with
        self.champion_evaluation = champion_evaluation
        failed = [promotion_gate.failure(v) for v in verdicts if not v.passed]
        super().__init__("the gate rejected the model: " + "; ".join(failed))

    def as_json(self) -> list[dict[str, Any]]:
        """The verdicts as in gate.json."""
        return [vars(verdict) for verdict in self.verdicts]


def settings_for_key(recipe: Recipe, force: str | None = None) -> dict[str, Any]:
    """The settings that affect the published folder. A forced one is reused by force only.

    Adapters alone need their base: the manifest says where it is.
    """
    settings = recipe.publish.key_settings()
    if recipe.train.method == "lora" and not recipe.publish.merge:
        settings["base"] = recipe.model.model_dump(mode="json")
    return settings | ({} if force is None else {"force": force})


def key_parts(
    recipe: Recipe, trained: Artifact, evaluated: Artifact, base: Base, force: str | None = None
) -> KeyParts:
    """The artifact's key, with the champion if a rule names it."""
    settings = settings_for_key(recipe, force)
    inputs = _inputs(recipe, trained, evaluated, base, settings)
    return KeyParts(STAGE, VERSION, settings, inputs)


def _inputs(
    recipe: Recipe, trained: Artifact, evaluated: Artifact, base: Base, settings: Mapping[str, Any]
) -> dict[str, str]:
    """Digests of the inputs.

    If the model itself is or was the champion, its input stays the champion it was compared with,
    so that another run of its recipe reuses it.

    Args:
        settings: of the key. The champion may have others, an earlier one may not.
    """
    inputs = {
        "model": trained.digest,
        "evaluation": evaluated.digest,
        "card": digest_json(model_card.base_card(base.folder)),
        **_license_digests(base.folder),
        **_copied_digests(recipe, base),
    }
    registry = registry_of(recipe)
    champion = registry.champion()
    if champion is None or not promotion_gate.needs_champion(recipe.publish.gate):
        return inputs
    was = champion.manifest["inputs"]
    if {name: was.get(name) for name in inputs} == inputs:
        return dict(was)
    if (earlier := registry.earlier_champion(settings, inputs)) is not None:
        return dict(earlier.manifest["inputs"])
    return {**inputs, "champion": champion.manifest["digest"]}


def compared_champion(recipe: Recipe, inputs: Mapping[str, str]) -> Version | None:
    """The version that the gate compares a model with, given the inputs of its key, if any."""
    if not promotion_gate.needs_champion(recipe.publish.gate):
        return None
    return _champion_before(recipe, inputs)


def check_champion(
    recipe: Recipe, trained: Artifact, evaluated: Artifact, base: Base, key: Mapping[str, Any]
) -> None:
    """Raise Away unless the champion is the one that a key names.

    Args:
        key: its `settings` and `inputs`, as in a manifest.
    """
    now = _inputs(recipe, trained, evaluated, base, key["settings"])
    if now.get("champion") != key["inputs"].get("champion"):
        raise Away("another model became the champion meanwhile: run again")


def _champion_before(recipe: Recipe, inputs: Mapping[str, str]) -> Version | None:
    """The champion that the key of `inputs` names; the present one if it names none.

    Of a model that is or was the champion itself it is the one before, if that was not deleted. A
    champion that was published without a comparison is compared with itself.
    """
    registry = registry_of(recipe)
    champion = registry.champion()
    if champion is None:
        return None
    known = [champion, *reversed(registry.versions())]
    if "champion" not in inputs:
        return next((one for one in known if one.manifest["inputs"] == inputs), champion)
    return next((one for one in known if one.manifest["digest"] == inputs["champion"]), None)


def registry_of(recipe: Recipe) -> Registry:
    """The registry that a recipe publishes to."""
    url = registry_url(recipe.store, recipe.publish.registry)
    return Registry(url, recipe.publish.name)


def build(
    given: Publication,
    champion_metrics: Callable[[str], PublishedMetrics],
    draft: Draft,
    progress: Progress,
) -> dict[str, Any]:
    """Judge the model, then write the published folder into the draft.

    Args:
        champion_metrics: URL of a published version -> metrics, comparable with the evaluation.

    Raises:
        Rejected: a rule or the smoke test failed; the draft is empty.
        Away: the champion is not the one that the draft's key names.
    """
    recipe = given.recipe
    inputs = draft.parts.inputs
    check_champion(recipe, given.trained, given.evaluated, given.base, draft.parts.as_dict())
    champion = _champion_before(recipe, inputs)
    models, again = _measured(recipe, given.evaluated, champion, champion_metrics)
    measured = json.loads(given.evaluated.read(METRICS)) | _compared(models)
    has_champion = champion is not None or "champion" in inputs
    verdicts = promotion_gate.judge(recipe.publish.gate, models, champion=has_champion)
    compared_with = champion.name if champion else None
    reject = partial(
        Rejected, measured=measured, compared_with=compared_with, champion_evaluation=again
    )
    passed = all(v.passed for v in verdicts)
    if not passed and given.force is None:
        raise reject(verdicts)
    forced = None if passed else given.force
    _check_license(recipe, given.base.folder)
    failed = ", ".join(verdict.rule for verdict in verdicts if not verdict.passed)
    progress(1, 3, "gate passed" if passed else f"gate failed ({failed}), forced: {forced}")
    with tempfile.TemporaryDirectory(prefix="kiln-publish-") as scratch:
        out = Path(scratch) / "model"
        _write_folder(given, measured, verdicts, forced, out)
        if (failure := _smoke_test(given, out)) is not None:
            raise reject([*verdicts, failure])
        progress(2, 3, "copying")
        for path in sorted(p for p in out.rglob("*") if p.is_file()):
            draft.upload(str(path), str(path.relative_to(out)))
    progress(3, 3, "published")
    return {
        "name": recipe.publish.name,
        "license": model_card.shown_license(recipe, given.base.folder),
        "lineage": given.lineage,
        "compared_with": compared_with,
        "forced": forced,
        "parents": {} if again is None else {CHAMPION_EVALUATION: again},
    }


def lineage_of(
    images: Artifact, latents: Artifact, trained: Artifact, evaluated: Artifact
) -> dict[str, str]:
    """Digests of all inputs of a model, for its card."""
    inputs = trained.manifest["inputs"]
    return {
        "source (rows of the list)": images.manifest["inputs"]["source"],
        "images": images.digest,
        "latents": latents.digest,
        "base": inputs["base"],
        **({"start of training": start} if (start := inputs.get("start")) else {}),
        "trained weights": trained.digest,
        "evaluation": evaluated.digest,
    }


def _measured(
    recipe: Recipe,
    evaluated: Artifact,
    champion: Version | None,
    champion_metrics: Callable[[str], PublishedMetrics],
) -> tuple[dict[str, Estimates], Artifact | None]:
    """The metrics of base and tuned model, and of the champion if a rule names it.

    Second: the champion's evaluation if it was measured again.
    """
    models = read_estimates(evaluated)
    if champion is None or not promotion_gate.needs_champion(recipe.publish.gate):
        return models, None
    models["champion"], again = champion_metrics(champion.uri)
    return models, again


def _compared(models: Mapping[str, Estimates]) -> dict[str, Any]:
    """`metrics` and `differences` of metrics.json, with the champion's if it was measured."""
    tuned = models["tuned"]
    found: dict[str, dict[str, Any]] = {name: {} for name in tuned}
    for model in (one for one in models if one != "tuned"):  # a set has no order
        for name, metric in differences(tuned, models[model]).items():
            found[name][model] = metric
    return {"metrics": metrics_by_name(models), "differences": found}


def _license_digests(base: Path) -> dict[str, str]:
    """The licence files' part of the key; empty without files."""
    found = {path.name: digest_bytes(path.read_bytes()) for path in model_card.license_files(base)}
    return {"license_files": digest_json(found)} if found else {}


def _copied_digests(recipe: Recipe, base: Base) -> dict[str, str]:
    """The key's part for what a pipeline folder copies and no evaluation reads; often nothing.

    Such are the `safety_checker` and the `feature_extractor`.
    """
    if recipe.train.method == "lora" and not recipe.publish.merge:
        return {}
    entries = base.index.items()
    parts = [name for name, spec in entries if isinstance(spec, list) and spec[0] is not None]
    copied = sorted(set(parts) - set(DRAWING_PARTS))
    return {"copied_parts": digest_model(base.folder, tuple(copied))} if copied else {}


def _check_license(recipe: Recipe, base: Path) -> None:
    if model_card.shown_license(recipe, base) == model_card.UNKNOWN_LICENSE:
        log.warning("publish: the licence is unknown: set publish.license")


def _write_folder(
    given: Publication,
    measured: dict[str, Any],
    verdicts: list[promotion_gate.Verdict],
    forced: str | None,
    out: Path,
) -> None:
    """Write the weights, and beside them card, licences, recipe and metrics."""
    recipe = given.recipe
    base = given.base
    with local_weights(given.trained) as tuned:
        _write_weights(given, tuned, out)
        weights = model_card.Weights.of(
            tuned, base, out, merged=recipe.publish.merge, vae_place=recipe.model.vae
        )
    training = model_card.training_facts(given.trained.manifest["run"], given.trained.summary)
    about = (recipe, base.folder, measured, verdicts, given.lineage, weights, training)
    card = model_card.write_card(*about, forced=forced)
    (out / "README.md").write_text(card, encoding="utf-8")
    for path in model_card.license_files(base.folder):
        shutil.copyfile(path, out / path.name)
    settings = dump_yaml(published_settings(recipe))
    (out / RECIPE).write_text(settings, encoding="utf-8")
    (out / METRICS).write_text(json.dumps(measured, indent=1, allow_nan=False))
    (out / BOOTSTRAP).write_bytes(given.evaluated.read(BOOTSTRAP))
    (out / GRID).write_bytes(given.evaluated.read(GRID))
    (out / GATE).write_text(json.dumps([vars(v) for v in verdicts], indent=1))


def _write_weights(given: Publication, tuned: TrainedWeights, out: Path) -> None:
    """Write a pipeline folder, adapters, or a pipeline with merged adapters and a copy of them."""
    settings = given.recipe.publish
    lora = tuned.lora
    alone = lora is not None and not settings.merge
    if not alone:
        adapters = None if lora is None else read_adapters(lora)
        assemble(given.base, tuned.parts, out, dtype=settings.dtype, adapters=adapters)
    if lora is not None:
        write_adapters(
            lora,
            given.base,
            out if alone else out / "lora",
            name=settings.name,
            dtype=settings.dtype,
            scheduler=tuned.parts.get("scheduler"),
        )


def _smoke_test(given: Publication, out: Path) -> promotion_gate.Verdict | None:
    """The verdict on a folder that fails to load or draw in a process without Kilnworks."""
    settings = given.recipe.publish
    fault = smoke_test.files_fault(out, settings.max_bytes)
    if fault is None and settings.smoke_test:
        log.info("publish: smoke test: diffusers loads the folder and draws a picture")
        fault = smoke_test.drawing_fault(out, given.base, given.recipe)
    if fault is None:
        return None
    return promotion_gate.Verdict("smoke test", False, None, None, fault)


def read_metrics(artifact: Artifact) -> dict[str, Any]:
    """Content of metrics.json, with the champion's metrics if it was compared; {} without one."""
    has_metrics = any(file.path == METRICS for file in artifact.files)
    return dict(json.loads(artifact.read(METRICS))) if has_metrics else {}


def show(artifact: Artifact) -> list[Panel]:
    """The gate's verdicts and the lineage; pictures and metrics are those of the evaluation."""
    verdicts = [promotion_gate.Verdict(**v) for v in json.loads(artifact.read(GATE))]
    summary = artifact.summary
    compared = summary["compared_with"] or "none"
    about = {"where": artifact.uri, "licence": summary["license"], "champion before": compared}
    if summary["forced"] is not None:
        about["published in spite of a failed gate"] = summary["forced"]
    return [
        Facts("Model", about),
        Table("Gate", promotion_gate.as_rows(verdicts)),
        Chart("Lineage", lineage_chart(lineage_nodes(artifact))),
        Facts("Digests", summary["lineage"]),
    ]


def show_verdicts(verdicts: Sequence[promotion_gate.Verdict], where: str) -> list[Panel]:
    """The verdicts on a rejected model, and the artifact with every number."""
    return [Table("Gate", promotion_gate.as_rows(verdicts)), Facts("Verdict", {"where": where})]
