"""The flow `finetune`: from a source of images to a published, evaluated model."""

from __future__ import annotations

import json
import logging
import uuid
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.states import Completed

from artifacts import gc
from artifacts.commit import write_atomic
from artifacts.keys import digest_json
from artifacts.latents import open_latents
from artifacts.store import Artifact, Draft, KeyParts
from configs.load import dump, load_recipe
from flows.logs import log_to_prefect
from flows.preflight import Prepared, check_gate, prepare
from flows.stages import StageFailed, run_stage
from tasks import download, encode, evaluate, publish, train
from tasks.panels import Facts, Table
from tasks.progress import Progress
from tasks.publish import Rejected, card, gate, report
from tasks.publish.registry import Registry, Version
from tasks.show import show_in_prefect
from tasks.stage import StageResult, TransientError, storing

log = logging.getLogger("kiln")


@flow(name="finetune", flow_run_name="finetune {recipe}")
def finetune(recipe: str = "digits", overrides: dict[str, Any] | None = None) -> Any:
    """Download, encode, train, evaluate, publish: each reused if its inputs have not changed.

    Args:
        recipe: Name of a recipe, or path of one (`kiln recipes` lists them).
        overrides: Dotted settings to change, such as {"train.steps": 100}.

    Returns a report (as `kiln run --json` prints it): status, stages, model, metrics; if it is
    published, the version that is `champion` and why; if it is rejected, the `gate`'s verdicts.
    """
    log_to_prefect()
    run = _Run(prepare(load_recipe(recipe, overrides)))
    images = run.download()
    latents = run.encode(images)
    trained = run.train(latents)
    evaluated = run.evaluate(images, latents, trained)
    try:
        published = run.publish(evaluated, images, latents, trained)
    except Rejected as rejection:
        return run.reject(rejection, evaluated)
    return run.register(published, evaluated)


class _Run:
    """One run of a recipe: calls the stages in turn and remembers how each came about."""

    def __init__(self, prepared: Prepared) -> None:
        self.at = prepared
        self.recipe = prepared.recipe
        self.store = prepared.store
        context = FlowRunContext.get()
        flow_run = context.flow_run.id if context and context.flow_run else uuid.uuid4()
        self.name = str(flow_run)
        self.keys: dict[str, str] = {}
        self.results: dict[str, StageResult] = {}
        self.artifacts: dict[str, Artifact] = {}

    def download(self) -> Artifact:
        plan = download.plan(self.recipe)
        return self._stage(
            download,
            {"source": plan.source_digest},
            lambda draft, progress: download.build(self.recipe, plan, draft, progress),
        )

    def encode(self, images: Artifact) -> Artifact:
        at = self.at
        return self._stage(
            encode,
            encode.inputs(images, at.model, at.vae),
            lambda draft, progress: encode.build(
                self.recipe, images, at.model, at.vae, draft, progress
            ),
            images=images,
        )

    def train(self, latents: Artifact) -> Artifact:
        at = self.at
        try:
            check_gate(self.recipe, open_latents(latents.uri))
        except gate.GateError as error:
            raise StageFailed(f"train: {error}") from error
        prompts = evaluate.sample_prompts(self.recipe)
        score = evaluate.SampleScorer(self.recipe.evaluate.judges, at.clip, prompts)
        return self._stage(
            train,
            {"latents": latents.digest, "base": at.base_digest()},
            lambda draft, progress: train.build(
                self.recipe, latents, at.model, at.vae, prompts, score, draft, progress
            ),
            latents=latents,
        )

    def evaluate(self, images: Artifact, latents: Artifact, trained: Artifact) -> Artifact:
        at = self.at
        return self._stage(
            evaluate,
            evaluate.inputs(self.recipe, images, latents, trained, at.model, at.vae, at.clip),
            lambda draft, progress: evaluate.build(
                self.recipe, images, latents, trained, at.model, at.vae, at.clip, draft, progress
            ),
            images=images,
            latents=latents,
            model=trained,
        )

    def publish(
        self, evaluated: Artifact, images: Artifact, latents: Artifact, trained: Artifact
    ) -> Artifact:
        at = self.at
        lineage = {
            "source (rows of the list)": images.manifest["inputs"]["source"],
            "images": images.digest,
            "latents": latents.digest,
            "base": trained.manifest["inputs"]["base"],
            "trained weights": trained.digest,
            "evaluation": evaluated.digest,
        }

        def champion_metrics(version: Version) -> dict[str, Any]:
            return evaluate.metrics_of_published(
                self.recipe, version.uri, images, latents, at.model, at.vae, at.clip, evaluated
            )

        return self._stage(
            publish,
            self._publish_inputs(evaluated, trained),
            lambda draft, progress: publish.build(
                self.recipe,
                trained,
                evaluated,
                lineage,
                at.model,
                at.vae,
                champion_metrics,
                draft,
                progress,
            ),
            model=trained,
            evaluation=evaluated,
        )

    def _publish_inputs(self, evaluated: Artifact, trained: Artifact) -> dict[str, str]:
        """What the gate's verdict rests on, the champion included if a rule names it.

        The champion that a model was published against stays its input once it is champion itself,
        so that running its recipe again reuses it.
        """
        inputs = {
            "model": trained.digest,
            "evaluation": evaluated.digest,
            "card": digest_json(str(card.base_card(self.at.model))),
        }
        champion = publish.registry_of(self.recipe).champion()
        if champion is None or not gate.needs_champion(self.recipe.publish.gate):
            return inputs
        was = champion.manifest["inputs"]
        if {name: was.get(name) for name in inputs} == inputs:
            return dict(was)
        return {**inputs, "champion": champion.manifest["digest"]}

    def register(self, published: Artifact, evaluated: Artifact) -> dict[str, Any]:
        """Put the model into the registry; a version new to it becomes the champion.

        Raises TransientError if the champion is no longer the one that the gate compared with.
        """
        registry = publish.registry_of(self.recipe)
        with storing(self.store):
            self._write_report(f"{published.path}/report.html")
            version = registry.publish(published)
            if not registry.was_champion(version.name):
                now = self._publish_inputs(evaluated, self.artifacts[train.STAGE])
                if now.get("champion") != published.manifest["inputs"].get("champion"):
                    raise TransientError("another model became champion meanwhile: run again")
                registry.promote(version.name, "published")
        self._show_where(registry, version)
        found = self._finish("published", version.uri, evaluated)
        found["champion"] = registry.last_move()  # another version, after a rollback
        return found

    def reject(self, rejection: Rejected, evaluated: Artifact) -> State[Any]:
        """End without a model: a measured outcome, not a failure of the flow."""
        log.warning("%s", rejection)
        rows = gate.as_rows(rejection.verdicts)
        show_in_prefect("publish", "publish: refused by the gate", lambda: [Table("Gate", rows)])
        found = self._finish("rejected", None, evaluated)
        found["gate"] = [vars(verdict) for verdict in rejection.verdicts]
        return Completed(name="Rejected", message=str(rejection), data=found)

    def _stage(
        self, module: Any, inputs: dict[str, str], build: Any, **parents: Artifact
    ) -> Artifact:
        parts = KeyParts(module.STAGE, module.VERSION, module.settings_for_key(self.recipe), inputs)
        self.keys[module.STAGE] = parts.key
        self._record({})
        progress = Progress(module.STAGE)

        def with_progress(draft: Draft) -> dict[str, Any]:
            summary: dict[str, Any] = build(draft, progress)
            return summary

        result, artifact = run_stage(self.store, parts, with_progress, parents, module.show)
        self.results[module.STAGE] = result
        self.artifacts[module.STAGE] = artifact
        return artifact

    def _write_report(self, path: str) -> None:
        """The page of the run that made the model: one that reuses everything leaves it."""
        built = self.results[publish.STAGE].outcome == "built"
        if built or not self.store.fs.exists(path):
            html = report.page(self.recipe, self.artifacts, self.results)
            write_atomic(self.store.fs, path, html.encode())

    def _show_where(self, registry: Registry, version: Version) -> None:
        champion = registry.champion()
        facts = {
            "model": version.uri,
            "version": version.name,
            "champion": champion.name if champion else "none",
            "report": f"{version.uri}/report.html",
        }
        heading = f"{registry.name} {version.name}"
        show_in_prefect("model", heading, lambda: [Facts("Published", facts)])

    def _record(self, report: dict[str, Any]) -> None:
        """Remember what this run needs, from before it is built: garbage collection asks."""
        stages = {name: {"key": key} for name, key in self.keys.items()}
        facts = {"recipe": dump(self.recipe), **report, "stages": stages}
        gc.record_run(self.store, self.name, facts)

    def _finish(self, status: str, model: str | None, evaluated: Artifact) -> dict[str, Any]:
        report = {
            "status": status,
            "stages": {
                name: {
                    "key": result.key,
                    "uri": result.uri,
                    "outcome": result.outcome,
                    "seconds": result.seconds,
                }
                for name, result in self.results.items()
            },
            "model": model,
            "metrics": json.loads(evaluated.read("metrics.json"))["metrics"],
        }
        self._record(report)
        return report
