"""A run of a checked recipe: what its stages are built from, and where.

A run builds its stages, or one stage that another run waits for. A retraining starts from a
champion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from artifacts.gc import record_run
from artifacts.store import Artifact, KeyParts, Store
from configs.errors import Failed
from configs.load_recipe import dump
from configs.settings.recipe import PLACED_STAGES, STAGES, PlacedStage, Recipe, StageName
from flows.prefect_run import Builder
from flows.send_stage import send_stage
from runtimes.pipeline_folder.folder import Base
from tasks import download, train
from tasks.beam.workers import settings_to_send
from tasks.evaluate.inputs import EvalInputs, MeasuringModels, model_digests
from tasks.evaluate.published import PublishedMetrics, metrics_of_published
from tasks.plan.disk import check_disk
from tasks.progress import Progress
from tasks.publish import stage as publish
from tasks.publish.registry import Version
from tasks.retrain.champion import Champion, check_rivals_held_out, check_start_is_champion
from tasks.retrain.selection import plan_changes
from tasks.stage import StageResult, storing


class Whole:
    """The scope of a run that builds all of its stages, each here or on its work pool."""

    def plan(self, run: Run) -> download.DownloadPlan:
        """The shards of the source. The run records that it needs the plan before it looks."""
        return download.plan(run.recipe, run.begin)

    def measures_champion(self, run: Run, model: publish.PublishStage) -> bool:
        """Whether a champion is measured with the model, which will be published."""
        is_due = publish.STAGE in run.stages
        return is_due and run.store.find(publish.STAGE, model.parts.key) is None

    def send(
        self,
        run: Run,
        parts: KeyParts,
        progress: Progress,
        before: Sequence[StageResult | Artifact],
    ) -> Callable[[], str] | None:
        """A call that lets the stage's work pool build it; None for a stage that is built here."""
        pools = run.recipe.place.pools()
        stage = next((placed for placed in PLACED_STAGES if placed == progress.stage), None)
        if stage is None or stage not in pools:
            return None
        parameters = {
            "stage": stage,
            "settings": settings_to_send(run.recipe),
            "key": parts.key,
            "before": {result.stage: result.key for result in before},
            # At a later stage the download exists: it must not be tried once more.
            "retry_run": run.retry_run if stage == "download" else None,
            "champion": run.start,
        }
        about = (pools[stage], run.model_name, run.store, stage)
        return partial(send_stage, *about, parameters, progress)


WHOLE = Whole()


@dataclass(frozen=True)
class Sent(Whole):
    """The scope of a run that builds a stage for another run, on another machine."""

    stage: PlacedStage
    key: str  # of its artifact
    before: Mapping[str, str]  # stage -> key of the artifacts that it is built from

    def results_before(self, run: Run) -> list[StageResult]:
        """The results that the stage is built from, in the order of the stages.

        The run records that it needs them before it looks for them. Raises Failed if a result was
        deleted.
        """
        keys = {stage: [key] for stage, key in self.before.items()}
        with storing(run.store):
            record_run(run.store, run.id, {**run.facts, "stages": keys})
        stages = sorted(self.before, key=("plan", *STAGES).index)
        return [StageResult.of_reused(run.store, stage, self.before[stage]) for stage in stages]

    def plan(self, run: Run) -> download.DownloadPlan:
        """The plan of the sender: the source may have grown since."""
        (plan,) = self.results_before(run)
        return download.planned(run.recipe, plan.load(run.store), run.begin)

    def measures_champion(self, run: Run, model: publish.PublishStage) -> bool:
        """Whether the run was sent for that alone: the evaluation of the model is there."""
        return self.key != model.evaluated.key

    def send(
        self,
        run: Run,
        parts: KeyParts,
        progress: Progress,
        before: Sequence[StageResult | Artifact],
    ) -> Callable[[], str] | None:
        """None, or a call that raises; None if the artifact is the expected one."""
        return None if parts.key == self.key else partial(self._fail, parts)

    def _fail(self, parts: KeyParts) -> NoReturn:
        raise Failed(
            f"{self.stage}: the sender expects {self.key[:12]}, this run would build "
            f"{parts.key[:12]}: the models or the version of Kilnworks differ between sender and "
            "worker, or what the sender had built was deleted: run again"
        )


@dataclass(frozen=True)
class Run(Builder):
    """A run of a checked recipe, with a writable store and local models."""

    recipe: Recipe
    store: Store
    base: Base
    measuring: MeasuringModels
    id: str  # of the flow run
    retry_run: str | None = None  # the run that fetches rows with transient failures again
    force: str | None = None  # the reason to publish a model that fails the gate
    stages: Sequence[StageName] = STAGES  # those that it builds
    scope: Whole = WHOLE
    trials: Sequence[Recipe] = ()  # the trials of a sweep, which differ in `train` alone

    @property
    def model_name(self) -> str:
        """Name of the model in training, in the registry and in Prefect."""
        return self.recipe.publish.name

    @property
    def facts(self) -> dict[str, Any]:
        """The recipe."""
        return {"recipe": dump(self.recipe)}

    @property
    def start(self) -> str | None:
        """Version of the champion that a retraining starts from."""
        return None

    @property
    def continues(self) -> bool:
        """Whether training continues from the weights of a champion."""
        return False

    def from_champion(self, champion: Champion | None) -> Run:
        """The retraining from a champion; without a champion, a first training."""
        return self if champion is None else Retraining(**vars(self), champion=champion)

    def send(
        self, parts: KeyParts, progress: Progress, before: Sequence[StageResult | Artifact]
    ) -> Callable[[], str] | None:
        """As `Builder.send`."""
        return self.scope.send(self, parts, progress, before)

    def plan(self) -> download.DownloadPlan:
        """The shards of the source. Raises Refused."""
        plan = self.changed(self.scope.plan(self))
        if train.STAGE in self.stages and not self.continues:  # that has steps of its own
            for recipe in self.trials or (self.recipe,):
                train.check_epochs(recipe.train, plan.rows, "rows")
        keys = {shard.key for shard in plan.shards}
        about = (self.recipe, self.store, self.base)
        check_disk(*about, plan.rows, self.stages, keys, self.trials)
        return plan

    def changed(self, plan: download.DownloadPlan) -> download.DownloadPlan:
        """The plan of the source as this run downloads it."""
        return plan

    def eval_inputs(self, images: Artifact, latents: Artifact) -> EvalInputs:
        """The inputs of an evaluation."""
        return EvalInputs(self.recipe, images, latents, self.base, self.measuring)

    def model_digests(self) -> dict[str, str]:
        """Model -> sha256 of the base, the VAE and the models that measure pictures.

        With the facts of the base's family.
        """
        of_base = model_digests(self.base) | self.base.family.key_facts
        return of_base | self.measuring.digests()

    def check_rivals(self, training: train.TrainStage) -> None:
        """Raise Refused if the champion was trained on pictures that are held out here.

        Weights in the store may have been published before.
        """
        is_judged = publish.STAGE in self.stages and self.force is None
        if is_judged and self.store.find(train.STAGE, training.parts.key) is None:
            check_rivals_held_out(self.recipe, self.store, training.latents)

    def check_start(self, model: str) -> None:
        """Raise Failed if the champion that a retraining started from was replaced.

        Args:
            model: digest of the weights in publication.
        """

    def champion_to_measure(self, trained: Artifact, evaluated: Artifact) -> Version | None:
        """The champion that the gate will compare the model with; None if there is no need of it.

        It is measured with the model, on the same device, before the publication needs its metrics.
        """
        model = publish.PublishStage(self.recipe, self.base, trained, evaluated, self.force)
        return model.compared_champion() if self.scope.measures_champion(self, model) else None

    def champion_metrics(
        self, data: EvalInputs, evaluated: Artifact, before: Sequence[StageResult]
    ) -> Callable[[str], PublishedMetrics]:
        """A call that returns the metrics of a published version, comparable with `evaluated`.

        Args:
            before: the results of the stages before the evaluation.
        """
        return partial(metrics_of_published, data, evaluated, partial(self.build, before=before))


@dataclass(frozen=True, kw_only=True)
class Retraining(Run):
    """A run that starts from the champion of its model."""

    champion: Champion

    @property
    def start(self) -> str:
        """Version of the champion."""
        return self.champion.version

    @property
    def continues(self) -> bool:
        """Whether training continues from the champion's weights."""
        return self.recipe.retrain.start == "champion"

    def changed(self, plan: download.DownloadPlan) -> download.DownloadPlan:
        """The plan with the shards of the champion, and new shards for new rows."""
        return plan_changes(self.recipe.download, self.store, self.champion, plan)[0]

    def eval_inputs(self, images: Artifact, latents: Artifact) -> EvalInputs:
        """The champion's held-out pictures, where it encodes alike."""
        data = super().eval_inputs(images, latents)
        compared = self.champion.comparison_set(self.recipe, self.store, latents)
        images, latents = compared or (images, latents)
        return replace(data, images=images, latents=latents, training_images=data.images)

    def check_rivals(self, training: train.TrainStage) -> None:
        """Nothing: `compare` has checked it before the download."""

    def check_start(self, model: str) -> None:
        """As `check_start_is_champion`."""
        check_start_is_champion(publish.registry_of(self.recipe), self.champion, model)
