"""The decision of a retraining, and the recipe by which the champion's training goes on.

The decision is an artifact: the same data is not tried twice from one champion.
The Prefect UI shows its summary.

Train from the champion's weights: the settings, the check and the model folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fsspec

from artifacts.gc import CONTINUED
from artifacts.store import Artifact, Draft, Store
from configs.errors import Refused
from configs.settings.recipe import Recipe
from configs.settings.train import Train
from configs.settings.train_parts import Profile
from runtimes.adapters.lora_files import LORA_WEIGHTS
from runtimes.objective.noise_schedule import FLOW, is_flow
from runtimes.pipeline_folder.folder import Base
from tasks import download, train
from tasks.build_or_reuse import GATE, GRID, METRICS, Stage
from tasks.caption import shard as caption
from tasks.describe import tables as describe
from tasks.encode import crop_to_bucket as encode
from tasks.evaluate import stage as evaluate
from tasks.evaluate.stage import show_closest_pairs
from tasks.panels import Facts, Panel, PicturePanel, Table
from tasks.progress import Progress, stage_links
from tasks.publish import promotion_gate
from tasks.publish import stage as publish
from tasks.publish.champion_alias import in_words
from tasks.retrain.champion import Champion
from tasks.retrain.selection import SELECTION, Changes
from tasks.select import stage as select
from tasks.trained_weights import local_weights

STAGE = "retrain"
VERSION = 2
FILE = "decision.json"


@dataclass(frozen=True)
class DecisionStage(Stage):
    """What a retraining decided, by all settings, models and versions that affect the verdict."""

    recipe: Recipe
    changes: Changes
    champion: Champion | None
    models: Mapping[str, str]  # name -> sha256 of the base, the VAE and the models that measure
    report: Mapping[str, Any] = field(default_factory=dict)  # of the retraining that has ended
    evidence: dict[str, Artifact] = field(default_factory=dict)  # its evaluation and verdict

    name = STAGE
    version = VERSION

    @property
    def settings(self) -> dict[str, Any]:
        """Settings and versions of all stages."""
        stages = {"download": download, "encode": encode, "train": train}
        stages |= {"evaluate": evaluate, "publish": publish}
        settings = {name: module.settings_for_key(self.recipe) for name, module in stages.items()}
        settings["retrain"] = self.recipe.retrain.key_settings()
        # A release that trains, measures or judges otherwise may decide otherwise.
        versions = {name: module.VERSION for name, module in stages.items()}
        chosen = {"describe": describe, "select": select, "caption": caption}
        for source, part in self.recipe.by_source.items():
            if source:  # the settings above are those that it has not
                own = {"download": part.download, "encode": part.encode}
                settings |= {f"{n} {source}": some.key_settings() for n, some in own.items()}
            for name, module in chosen.items():
                section = getattr(part, name)
                if section is not None:
                    settings[f"{name} {source}".rstrip()] = section.key_settings()
                    versions[name] = module.VERSION
        settings["versions"] = versions | {"retrain": SELECTION}
        return settings

    @property
    def inputs(self) -> dict[str, str]:
        """The source, the champion and the models."""
        champion = "" if self.champion is None else self.champion.digest
        return {"source": self.changes.source, "champion": champion, **self.models}

    @property
    def parents(self) -> dict[str, Artifact]:
        """The evaluation, and the verdict on a rejected model."""
        return self.evidence

    @property
    def too_few_rows(self) -> str | None:
        """One sentence if the source has fewer new rows than a retraining needs."""
        changes = self.changes
        least = self.recipe.retrain.min_new_rows
        if self.champion is None or changes.new_rows >= least:
            return None
        rows = f"{changes.new_rows:,} new rows" if changes.new_rows else "no new rows"
        enough = f", fewer than {least:,}" if changes.new_rows else ""
        removed = f"; {changes.removed_rows:,} rows were removed" if changes.removed_rows else ""
        return f"the source has {rows} since {self.champion.version}{enough}{removed}"

    def why_unchanged(self, store: Store) -> str | None:
        """One sentence why there is nothing to train; None if there is."""
        if self.too_few_rows is not None:
            return self.too_few_rows
        champion = self.champion
        history = publish.registry_of(self.recipe).history()
        waiting = history.waiting
        if waiting is not None and self.recipe.retrain.candidate == "wait":
            return f"{in_words(waiting)}: decide, or set retrain.candidate: replace"
        artifact = store.find(STAGE, self.parts.key)
        if artifact is None:
            return None
        decided = artifact.summary
        version = decided["version"]
        candidate = history.candidate(version)
        if candidate is not None and all(move["version"] != version for move in history.moves):
            stands = candidate == waiting or "rejected" in candidate  # else it is asked for anew
            return f"{in_words(candidate)}; it has these rows" if stands else None
        if decided["status"] == "rejected":
            before = "the base" if champion is None else champion.version
            rows = f"these {self.changes.rows:,} rows"
            return f"the gate rejected a model of {rows} and {before} before"
        if champion is None:  # its registry was deleted
            return None
        now = champion.version
        return f"{version} of these rows was published before, and {now} is champion again"

    def build(self, draft: Draft, progress: object) -> dict[str, Any]:
        """Write the report of the retraining; returns the summary."""
        draft.write(FILE, json.dumps(self.report, indent=1).encode())
        model = self.report["model"]
        return {
            "status": self.report["status"],
            "version": None if model is None else model.rpartition("/")[2],
            "changes": asdict(self.changes),
        }


def show_retraining(
    model: str, store: Store, champion: Champion | None, changes: Changes, report: dict[str, Any]
) -> list[Panel]:
    """What changed, the samples, the metrics before and after, the verdict, and the pictures."""
    facts = {"status": report["status"], "champion before": report["start"] or "none"}
    facts |= {"why": report["why"]} if "why" in report else {}
    facts |= {"model": report["model"]} if report["model"] else {}
    panels: list[Panel] = [Facts("Retraining", facts), Facts("Source", _source_facts(changes))]
    if "samples" in report:
        panels.append(Facts("Training", report["samples"]))
    stages = report["stages"]
    if "evaluate" not in stages:
        return panels
    evaluated = store.load("evaluate", stages["evaluate"]["key"])
    if evaluated is not None:
        rows = _metrics(store, evaluated, champion, report)
        panels.append(Table("Metrics on equal held-out pictures", rows))
        panels.append(PicturePanel("Base above, new model below", evaluated.read(GRID)))
        panels += show_closest_pairs(evaluated)
    gate = report.get("gate")
    if gate is None and report["model"] is not None:
        gate = _read(report["model"], GATE)
    if gate is not None:
        verdicts = [promotion_gate.Verdict(**verdict) for verdict in gate]
        panels.append(Table("Gate", promotion_gate.as_rows(verdicts)))
    if champion is not None:
        with fsspec.open(f"{champion.uri}/{GRID}", "rb") as stream:
            panels.append(PicturePanel(f"Base above, {champion.version} below", stream.read()))
    return [*panels, stage_links(model, stages)]


def _source_facts(changes: Changes) -> dict[str, Any]:
    return {
        "rows": changes.rows,
        "new rows": changes.new_rows,
        "removed rows": changes.removed_rows,
        "rows to fetch": changes.rows_to_fetch,
        "shards reused": changes.kept_shards,
        "shards to build": changes.new_shards,
    }


def _metrics(
    store: Store, evaluated: Artifact, champion: Champion | None, report: dict[str, Any]
) -> list[dict[str, Any]]:
    """Rows of (metric, base, champion, new); the champion's column only if it is comparable."""
    old = {} if champion is None else _champions_metrics(store, evaluated, champion, report)
    return [
        {
            "metric": name,
            "base": models["base"]["value"] if "base" in models else "—",
            "champion": old[name]["value"] if name in old else "—",
            "new": models["tuned"]["value"],
        }
        for name, models in evaluated.summary["metrics"].items()
    ]


def _champions_metrics(
    store: Store, evaluated: Artifact, champion: Champion, report: dict[str, Any]
) -> dict[str, Any]:
    """Metric -> {value, ...} of the champion: as the gate compared them, else as published."""
    judged = verdict_of(store, report)
    if judged is not None or report["model"] is not None:
        uri = report["model"] if judged is None else judged.uri
        compared = _read(uri, METRICS)["metrics"]
        metrics = {n: models["champion"] for n, models in compared.items() if "champion" in models}
        if metrics:  # a rule names the champion, which may have been measured again
            return metrics
    before = _read(champion.uri, METRICS)
    if before.get("fingerprint") != evaluated.summary["fingerprint"]:
        return {}
    return {n: models["tuned"] for n, models in before["metrics"].items() if "tuned" in models}


def verdict_of(store: Store, report: dict[str, Any]) -> Artifact | None:
    """The verdict on a rejected model; None for a published model."""
    verdict = publish.VerdictStage.name
    return store.load(verdict, report[verdict]["key"]) if verdict in report else None


def _read(uri: str, name: str) -> Any:
    """Content of a JSON file of a published model or of an artifact."""
    with fsspec.open(f"{uri}/{name}", "rb") as stream:
        return json.load(stream)


#: A warm-up takes a tenth of a retraining's steps at most.
LEAST_STEPS_PER_WARMUP_STEP = 10


def recipe_of(recipe: Recipe, selection: Artifact) -> Recipe:
    """The recipe with the steps of a retraining, in proportion to the selected samples."""
    settings = recipe.retrain
    summary = selection.summary
    planned = recipe.train.model_copy(update={"epochs": settings.epochs})
    proportional = planned.with_steps(summary["new"] + summary["replayed"]).steps
    steps = min(proportional, settings.max_steps)
    changed: dict[str, Any] = {
        "steps": steps,
        # The recipe's warm-up is for more steps: the rate would never reach its peak.
        "lr_warmup_steps": min(recipe.train.lr_warmup_steps, steps // LEAST_STEPS_PER_WARMUP_STEP),
        "epochs": None,
        "init": "base",  # the start has the denoiser's weights and its config
        "denoiser_config": None,
    }
    profile = recipe.train.profile
    if profile.start + profile.steps > steps:
        changed["profile"] = Profile()  # a trace of steps that this short run lacks
    if settings.learning_rate is not None:
        changed["learning_rate"] = settings.learning_rate
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=changed)})


def check_start(recipe: Recipe, base: Base, start: Artifact) -> None:
    """Raise Refused if the weights of `start` have another base, or were trained otherwise."""
    fixed = Train.names_with("fixed_by_weights")
    before = _with_those_of(base, start.manifest["settings"])
    now = _with_those_of(base, train.settings_for_key(recipe))
    changed = [
        f"train.{name}"
        for name in Train.model_fields
        if name in fixed and before.get(name) != now.get(name)
    ]
    if start.manifest["inputs"]["base"] != train.digest_base(recipe.train, base):
        changed.append("model")
    if changed:
        raise Refused(
            f"retrain.start: champion: training cannot continue from its weights "
            f"({', '.join(changed)}): set retrain.start: base"
        )


@dataclass(frozen=True)
class ContinuedTraining(train.TrainStage):
    """Selected latents, as weights trained on from those of a champion.

    The held-out samples are of all latents, whichever shards are selected: few of them may have
    none.
    """

    @property
    def parents(self) -> dict[str, Artifact]:
        """The selection, and the weights that it continues."""
        assert self.start is not None
        return {"latents": self.latents, CONTINUED: self.start}

    def build(
        self, draft: Draft, progress: Progress, adapters: str | None = None
    ) -> dict[str, Any]:
        """Train from the weights or adapters of `start`, on the selected samples."""
        assert self.start is not None
        if self.recipe.train.method == "lora":
            adapters = f"{self.start.uri}/{LORA_WEIGHTS}"
        with starting_model(self.base, self.start) as model:
            return super(ContinuedTraining, replace(self, base=model)).build(
                draft, progress, adapters
            )

    def facts(self, summary: dict[str, Any]) -> dict[str, Any]:
        """The samples that the run was trained on."""
        selected = self.latents.summary
        counts = {name: selected[name] for name in ("new", "replayed")}
        return {"samples": {**counts, "steps": self.recipe.train.steps}}


def _with_those_of(base: Base, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, with the base's prediction type and terminal SNR instead of null."""
    own = base.scheduler
    resolved = {
        "prediction_type": FLOW if is_flow(own) else own.get("prediction_type", "epsilon"),
        "zero_terminal_snr": own.get("rescale_betas_zero_snr", False),
    }
    return settings | {n: value for n, value in resolved.items() if settings.get(n) is None}


@contextmanager
def starting_model(base: Base, start: Artifact) -> Iterator[Base]:
    """The base in another folder, with the trained parts of `start` instead of its own.

    The scheduler stays the base's: the recipe's settings define that of the trained model.
    """
    with local_weights(start) as weights, TemporaryDirectory(prefix="kiln-start-") as folder:
        trained = {name: path for name, path in weights.parts.items() if name != "scheduler"}
        parts = {path.name: path for path in base.folder.iterdir()} | trained
        for name, part in parts.items():
            Path(folder, name).symlink_to(part.resolve())
        yield replace(base, folder=Path(folder))
