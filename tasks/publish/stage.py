"""The publish stage: gate, diffusers folder, registry.

The lineage of a published model is its artifacts and their inputs, as nodes of a graph.

The verdict on a rejected model is an artifact with every number that the gate judged.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from artifacts.models import digest_model
from artifacts.records import digest_bytes, digest_json
from artifacts.store import Artifact, Draft, Store
from configs.errors import Away, Failed
from configs.load_recipe import dump_yaml
from configs.settings.recipe import Recipe
from runtimes.adapters.lora_files import read_adapters
from runtimes.objective.noise_schedule import read_scheduler_config
from runtimes.pipeline_folder.folder import Base
from tasks.build_or_reuse import BOOTSTRAP, GATE, GRID, METRICS, RECIPE, Stage
from tasks.data_set import IMAGES, DataSet, column_facts
from tasks.evaluate.distances import Estimates, differences
from tasks.evaluate.draw import DRAWING_PARTS, read_pictures
from tasks.evaluate.published import PublishedMetrics
from tasks.evaluate.stage import metrics_by_name, read_estimates
from tasks.panels import Chart, Facts, Panel, Table
from tasks.panels_charts import Node, lineage_chart
from tasks.pictures import images_of, sources_of
from tasks.progress import Report
from tasks.publish import comfyui, model_card, promotion_gate, smoke_test
from tasks.publish.assemble import KOHYA_SUFFIX, assemble, write_adapters, write_control
from tasks.publish.model_card import published_settings
from tasks.publish.registry import Registry, Version, registry_url
from tasks.trained_weights import TrainedWeights, local_weights

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
    known = {*artifact.manifest["run"].get("parents", {}), *TITLES}
    inputs = []
    for name, digest in sorted(artifact.manifest["inputs"].items()):
        source = parent_of(artifact.manifest, name, artifact.store)
        if source is not None:
            inputs.append(_add(source, nodes))
        elif name in known:
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
    return parent_of(artifact.manifest, CHAMPION_EVALUATION, artifact.store)


def parent_of(manifest: Mapping[str, Any], name: str, store: Store) -> Artifact | None:
    """A parent that a manifest names; None if it names none, or the store lacks it."""
    parent = manifest["run"].get("parents", {}).get(name)
    return store.load(parent["stage"], parent["key"]) if parent else None


STAGE = "publish"
VERSION = 3
log = logging.getLogger("kiln")


class Rejected(Failed):
    """The model failed a rule of the gate, or no rule can be decided yet.

    Args:
        verdicts: of all rules.
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
        words = "the gate rejected the model: "
        if self.outcome == "undecided":
            words = "not enough pictures to tell: "
        super().__init__(words + "; ".join(failed))

    @property
    def outcome(self) -> Literal["rejected", "undecided"]:
        """`undecided` if more pictures may let the model pass."""
        return "undecided" if promotion_gate.is_undecided(self.verdicts) else "rejected"

    def as_json(self) -> list[dict[str, Any]]:
        """The verdicts as in gate.json."""
        return [vars(verdict) for verdict in self.verdicts]


def settings_for_key(recipe: Recipe, force: str | None = None) -> dict[str, Any]:
    """The settings that affect the published folder.

    A model published with `force` is reused only with the same `force`.

    Adapters or a ControlNet alone need their base: the manifest says where it is.
    """
    settings = recipe.publish.key_settings()
    if _needs_base(recipe):
        settings["base"] = recipe.model.model_dump(mode="json")
    if recipe.evaluate.max_pictures is not None:  # the levels differ from those of an only look
        settings["looks"] = True
    return settings | ({} if force is None else {"force": force})


def _needs_base(recipe: Recipe) -> bool:
    """Whether what is published is no pipeline."""
    method = recipe.train.method
    return method == "controlnet" or (method == "lora" and not recipe.publish.merge)


@dataclass(frozen=True)
class PublishStage(Stage):
    """A measured model, as a diffusers folder with its card."""

    recipe: Recipe
    base: Base
    trained: Artifact
    evaluated: Artifact
    #: The reason to publish a model that fails a rule; the card and the history name it.
    force: str | None = None
    lineage: Mapping[str, str] = field(default_factory=dict)  # input -> digest, for the card
    #: URL of a published version -> metrics, comparable with the evaluation.
    champion_metrics: Callable[[str], PublishedMetrics] | None = None

    name = STAGE
    version = VERSION

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that affect the folder, and the reason to publish it."""
        return settings_for_key(self.recipe, self.force)

    @property
    def inputs(self) -> dict[str, str]:
        """What the folder is made of, and the champion if a rule names it."""
        return self.inputs_of(self.settings)

    def inputs_of(self, settings: Mapping[str, Any]) -> dict[str, str]:
        """Digests of the inputs.

        A model that is or was the champion keeps the champion that it was compared with as its
        input. Another run of its recipe then reuses it.

        Args:
            settings: those in the key. The champion may have others, an earlier champion may not.
        """
        inputs = {
            "model": self.trained.digest,
            "evaluation": self.evaluated.digest,
            "card": digest_json(model_card.base_card(self.base.folder)),
            **self._copied_digests(),
        }
        texts = model_card.license_files(self.base.folder)
        if digests := {path.name: digest_bytes(path.read_bytes()) for path in texts}:
            inputs["license_files"] = digest_json(digests)
        champion = self.registry.champion()
        if champion is None or not self._names_champion:
            return inputs
        was = champion.manifest["inputs"]
        if {name: was.get(name) for name in inputs} == inputs:
            return dict(was)
        if (earlier := self.registry.earlier_champion(settings, inputs)) is not None:
            return dict(earlier.manifest["inputs"])
        return {**inputs, "champion": champion.manifest["digest"]}

    @property
    def parents(self) -> dict[str, Artifact]:
        """The trained weights and their evaluation."""
        return {"model": self.trained, "evaluation": self.evaluated}

    @cached_property
    def registry(self) -> Registry:
        """The registry that the recipe publishes to."""
        return registry_of(self.recipe)

    def compared_champion(self) -> Version | None:
        """The version that the gate compares the model with, if any."""
        return self._champion_before(self.parts.inputs) if self._names_champion else None

    def check_champion(self, key: Mapping[str, Any]) -> None:
        """Raise Away unless a key names the present champion.

        Args:
            key: its `settings` and `inputs`, as in a manifest.
        """
        now = self.inputs_of(key["settings"])
        if now.get("champion") != key["inputs"].get("champion"):
            raise Away("another model became the champion meanwhile: run again")

    def judged(
        self, inputs: Mapping[str, str]
    ) -> tuple[list[promotion_gate.Verdict], dict[str, Estimates], Artifact | None]:
        """The verdicts, the metrics of all models, and the champion's evaluation if it is new.

        Args:
            inputs: those of the key, which name the champion.
        """
        champion = self._champion_before(inputs)
        models = read_estimates(self.evaluated)
        again = None
        if champion is not None and self._names_champion:
            assert self.champion_metrics is not None
            models["champion"], again = self.champion_metrics(champion.uri)
        has_champion = champion is not None or "champion" in inputs
        rounds = self.evaluated.summary.get("rounds", 1)
        drawn = self.evaluated.summary.get("pictures")
        verdicts = promotion_gate.judge(
            self.recipe.publish.gate,
            models,
            champion=has_champion,
            look=0 if self.recipe.evaluate.max_pictures is None else rounds,
            pictures=drawn and drawn // rounds,
        )
        return verdicts, models, again

    def build(self, draft: Draft, progress: Report) -> dict[str, Any]:
        """Judge the model, then write the published folder into the draft.

        Raises:
            Rejected: a rule or the smoke test failed; the draft is empty.
            Away: the draft's key names another champion.
        """
        recipe = self.recipe
        inputs = draft.parts.inputs
        self.check_champion(draft.parts.as_dict())
        champion = self._champion_before(inputs)
        verdicts, models, again = self.judged(inputs)
        measured = json.loads(self.evaluated.read(METRICS)) | _compared(models)
        compared_with = champion.name if champion else None
        reject = partial(
            Rejected, measured=measured, compared_with=compared_with, champion_evaluation=again
        )
        passed = all(v.passed for v in verdicts)
        if not passed and self.force is None:
            raise reject(verdicts)
        forced = None if passed else self.force
        shown_license = model_card.shown_license(recipe.publish, self.base.folder)
        if shown_license == model_card.UNKNOWN_LICENSE:
            log.warning("publish: the licence is unknown: set publish.license")
        failed = ", ".join(verdict.rule for verdict in verdicts if not verdict.passed)
        progress(1, 3, "gate passed" if passed else f"gate failed ({failed}), forced: {forced}")
        with tempfile.TemporaryDirectory(prefix="kiln-publish-") as scratch:
            out = Path(scratch) / "model"
            self._write_folder(measured, verdicts, forced, out)
            if (failure := self._smoke_test(out)) is not None:
                raise reject([*verdicts, failure])
            progress(2, 3, "copying")
            for path in sorted(p for p in out.rglob("*") if p.is_file()):
                draft.upload(str(path), str(path.relative_to(out)))
        progress(3, 3, "published")
        return {
            "name": recipe.publish.name,
            "license": shown_license,
            "lineage": dict(self.lineage),
            "compared_with": compared_with,
            "forced": forced,
            "parents": {} if again is None else {CHAMPION_EVALUATION: again},
        }

    @property
    def _names_champion(self) -> bool:
        return promotion_gate.needs_champion(self.recipe.publish.gate)

    def _champion_before(self, inputs: Mapping[str, str]) -> Version | None:
        """The champion that the key of `inputs` names; the present champion if it names none.

        For a model that is or was the champion itself, it is the predecessor, if that was not
        deleted. A champion that was published without a comparison is compared with itself.
        """
        champion = self.registry.champion()
        if champion is None:
            return None
        known = [champion, *reversed(self.registry.versions())]
        if "champion" not in inputs:
            return next((v for v in known if v.manifest["inputs"] == inputs), champion)
        return next((v for v in known if v.manifest["digest"] == inputs["champion"]), None)

    def _copied_digests(self) -> dict[str, str]:
        """The key's part for what a pipeline folder copies and no evaluation reads; often nothing.

        Such are the `safety_checker` and the `feature_extractor`.
        """
        if _needs_base(self.recipe):
            return {}
        entries = self.base.index.items()
        parts = [name for name, spec in entries if isinstance(spec, list) and spec[0] is not None]
        copied = tuple(sorted(set(parts) - set(DRAWING_PARTS)))
        return {"copied_parts": digest_model(self.base.folder, copied)} if copied else {}

    def _write_folder(
        self,
        measured: dict[str, Any],
        verdicts: list[promotion_gate.Verdict],
        forced: str | None,
        out: Path,
    ) -> None:
        """Write the weights, and beside them card, licences, recipe and metrics."""
        recipe = self.recipe
        base = self.base
        with local_weights(self.trained) as tuned:
            self._write_weights(tuned, out)
            weights = model_card.Weights.of(
                tuned, base, out, merged=recipe.publish.merge, vae_place=recipe.model.vae
            )
        trained = self.trained
        training = model_card.training_facts(
            trained.manifest["run"], trained.summary, recipe.encode
        )
        lineage = dict(self.lineage)
        about = (recipe, base.folder, measured, verdicts, lineage, weights, training)
        card = model_card.write_card(
            *about, forced=forced, columns=self._kept_columns(), sources=self._sources()
        )
        (out / "README.md").write_text(card, encoding="utf-8")
        for path in model_card.license_files(base.folder):
            shutil.copyfile(path, out / path.name)
        settings = dump_yaml(published_settings(recipe))
        (out / RECIPE).write_text(settings, encoding="utf-8")
        (out / METRICS).write_text(json.dumps(measured, indent=1, allow_nan=False))
        (out / BOOTSTRAP).write_bytes(self.evaluated.read(BOOTSTRAP))
        (out / GRID).write_bytes(self.evaluated.read(GRID))
        (out / GATE).write_text(json.dumps([vars(v) for v in verdicts], indent=1))

    def _kept_columns(self) -> list[dict[str, Any]]:
        """What the kept columns of the source say of the pictures trained on, for the card."""
        rows: list[dict[str, Any]] = []
        whole = DataSet.before(self.trained)
        for name, data in whole.by_source.items():
            part = self.recipe.by_source[name]
            columns = getattr(part.source, "additional_columns", ())
            # `kiln gc` may have deleted them.
            if columns and {IMAGES, "encode"} <= data.artifacts.keys():
                facts = column_facts(data, columns, part.encode.holdout)
                rows += [{"source": name, **row} if name else row for row in facts]
        return rows

    def _sources(self) -> list[dict[str, Any]]:
        """The sources of the mixture, for the card: what they are, and how much each counts."""
        latents = DataSet.before(self.trained).artifacts.get("encode")
        counted = {} if latents is None else latents.summary.get("sources", {})
        return [
            {
                "source": name,
                "trained on": n["samples"] - n["holdout"] - n["copies_left_out"],
                "held out": n["holdout"],
                **{fact: value or "" for fact, value in self.recipe.mixture[name].items()},
            }
            for name, n in counted.items()
        ]

    def _write_weights(self, tuned: TrainedWeights, out: Path) -> None:
        """Write a pipeline folder, adapters, a pipeline with merged ones, or a ControlNet."""
        settings = self.recipe.publish
        lora = tuned.lora
        scheduler = tuned.parts.get("scheduler")
        if (control := tuned.parts.get("controlnet")) is not None:
            return write_control(control, out, dtype=settings.dtype, scheduler=scheduler)
        alone = lora is not None and not settings.merge
        if not alone:
            adapters = None if lora is None else read_adapters(lora)
            assemble(self.base, tuned.parts, out, dtype=settings.dtype, adapters=adapters)
        if lora is not None:
            folder = out if alone else out / "lora"
            names = {"name": settings.file_stem, "dtype": settings.dtype}
            write_adapters(lora, self.base, folder, **names, scheduler=scheduler)
            self._write_workflow(folder, scheduler)

    def _write_workflow(self, folder: Path, scheduler: Path | None) -> None:
        """Write a workflow for ComfyUI beside adapters, with the first picture drawn with them."""
        recipe = self.recipe
        name = recipe.publish.file_stem
        kohya = (folder / f"{name}{KOHYA_SUFFIX}").is_file()
        file = comfyui.adapter_file(self.base.family, name, recipe.train.lora, kohya=kohya)
        config = read_scheduler_config(scheduler or self.base.part("scheduler"))
        nodes = file and comfyui.workflow(
            recipe, self.base, config, file, model_card.prompt_of(recipe.evaluate)
        )
        if nodes:
            store = self.evaluated.store
            shard = store.shard(self.evaluated.stage, self.evaluated.summary["drawn"]["tuned"])
            assert shard is not None  # the evaluation names it
            comfyui.write(nodes, next(read_pictures(store, shard)), folder)

    def _smoke_test(self, out: Path) -> promotion_gate.Verdict | None:
        """The verdict on a folder that fails to load or draw in a process without Kilnworks."""
        settings = self.recipe.publish
        drawn = (self.recipe.model, self.recipe.evaluate.measuring_device)
        fault = smoke_test.files_fault(out, settings.max_bytes)
        if fault is None and settings.smoke_test:
            log.info("publish: smoke test: diffusers loads the folder and draws a picture")
            fault = smoke_test.drawing_fault(out, self.base, *drawn)
        if fault is None:
            return None
        return promotion_gate.Verdict("smoke test", False, None, None, fault)

    @staticmethod
    def show(artifact: Artifact) -> list[Panel]:
        """The gate's verdicts and the lineage; pictures and metrics are those of the evaluation."""
        summary = artifact.summary
        compared = summary["compared_with"] or "none"
        about = {"where": artifact.uri, "licence": summary["license"], "champion before": compared}
        if summary["forced"] is not None:
            about["published in spite of a failed gate"] = summary["forced"]
        return [
            Facts("Model", about),
            _gate(artifact),
            Chart("Lineage", lineage_chart(lineage_nodes(artifact))),
            Facts("Digests", summary["lineage"]),
        ]


def registry_of(recipe: Recipe) -> Registry:
    """The registry that a recipe publishes to."""
    url = registry_url(recipe.store, recipe.publish.registry)
    return Registry(url, recipe.publish.name)


def lineage_of(
    images: Artifact, latents: Artifact, trained: Artifact, evaluated: Artifact
) -> dict[str, str]:
    """Digests of all inputs of a model, for its card."""
    inputs = trained.manifest["inputs"]
    return {
        **_lineage_of_pictures(images, latents),
        "latents": latents.digest,
        "base": inputs["base"],
        **({"start of training": start} if (start := inputs.get("start")) else {}),
        "trained weights": trained.digest,
        "evaluation": evaluated.digest,
    }


def _lineage_of_pictures(images: Artifact, latents: Artifact) -> dict[str, str]:
    """Digests of what the latents are from; of a mixture, of each source under its name."""
    parts = sources_of(latents)
    if "" not in parts:
        return {
            f"{name}: {what}": digest
            for name, part in parts.items()
            for what, digest in _lineage_of_pictures(images_of(part), part).items()
        }
    encoded = latents.manifest["inputs"]
    chosen = {"selection": encoded.get("selected"), "captions": encoded.get("captions")}
    return {
        "source (rows of the list)": images.manifest["inputs"]["source"],
        "images": images.digest,
        **{name: digest for name, digest in chosen.items() if digest is not None},
    }


def _compared(models: Mapping[str, Estimates]) -> dict[str, Any]:
    """`metrics` and `differences` of metrics.json, with the champion's if it was measured."""
    tuned = models["tuned"]
    by_name: dict[str, dict[str, Any]] = {name: {} for name in tuned}
    for model in (other for other in models if other != "tuned"):  # a set has no order
        for name, metric in differences(tuned, models[model]).items():
            by_name[name][model] = metric
    return {"metrics": metrics_by_name(models), "differences": by_name}


def _gate(artifact: Artifact) -> Table:
    """The verdicts of the gate on a model, published or rejected."""
    verdicts = [promotion_gate.Verdict(**verdict) for verdict in json.loads(artifact.read(GATE))]
    return Table("Gate", promotion_gate.as_rows(verdicts))


@dataclass(frozen=True)
class VerdictStage(Stage):
    """The reasons of a rejection, and the metrics of all models with their intervals."""

    publication: PublishStage
    rejection: Rejected

    name = "verdict"
    version = 2

    @property
    def settings(self) -> dict[str, Any]:
        """Those of the publication."""
        return self.publication.parts.settings

    @property
    def inputs(self) -> dict[str, str]:
        """Inputs of the publication, and what was judged.

        One model may be rejected for other reasons later, such as by the smoke test.
        """
        judged = {"gate": self.rejection.as_json(), "metrics": self.rejection.measured}
        return {**self.publication.parts.inputs, "judged": digest_json(judged)}

    @property
    def parents(self) -> dict[str, Artifact]:
        """The trained weights and their evaluation."""
        return self.publication.parents

    def build(self, draft: Draft, progress: object) -> dict[str, Any]:
        """Write the verdicts, and the metrics of all models."""
        rejection = self.rejection
        verdicts = rejection.as_json()
        draft.write(GATE, json.dumps(verdicts, indent=1).encode())
        draft.write(METRICS, json.dumps(rejection.measured, indent=1, allow_nan=False).encode())
        again = rejection.champion_evaluation
        return {
            "status": rejection.outcome,
            "failed": [verdict["rule"] for verdict in verdicts if not verdict["passed"]],
            "compared_with": rejection.compared_with,
            "parents": {} if again is None else {CHAMPION_EVALUATION: again},
        }

    @staticmethod
    def show(artifact: Artifact) -> list[Panel]:
        """The verdicts on a rejected model, and the artifact with every number."""
        return [_gate(artifact), Facts("Verdict", {"where": artifact.uri})]
