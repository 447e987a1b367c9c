"""A run of a checked recipe: what its stages are built from, and where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from artifacts.gc import record_run
from artifacts.store import Artifact, KeyParts, Store
from configs.load_recipe import dump
from configs.settings.recipe import PLACED_STAGES, STAGES, PlacedStage, Recipe, StageName
from flows.check_disk import check_disk
from flows.send_stage import send_stage
from flows.task_states import begin
from runtimes.families import detect_family
from tasks import download, train
from tasks.beam.workers import settings_to_send
from tasks.evaluate.inputs import EvalInputs, MeasuringModels, model_digests
from tasks.evaluate.published import PublishedMetrics, metrics_of_published
from tasks.progress import Progress
from tasks.publish import stage as publish
from tasks.publish.registry import Version
from tasks.retrain.champion import Champion, check_start_is_champion
from tasks.retrain.changes import plan_changes
from tasks.stage import StageFailed, StageResult, storing


@dataclass(frozen=True)
class Sent:
    """A stage that another run waits for, on another machine."""

    stage: PlacedStage
    key: str  # of its artifact
    before: Mapping[str, str]  # stage -> key of the artifacts that it is built from


@dataclass(frozen=True)
class Run:
    """A run of a checked recipe, with a writable store and local models."""

    recipe: Recipe
    store: Store
    base: Path  # pipeline folder
    vae: Path | None
    measuring: MeasuringModels
    id: str  # of the flow run
    retry_run: str | None = None  # the run that fetches rows with transient failures again
    champion: Champion | None = None  # the champion that a retraining starts from
    force: str | None = None  # the reason to publish a model that fails the gate
    stages: Sequence[StageName] = STAGES  # those that it builds
    sent: Sent | None = None  # what another run waits for; None: the run builds `stages`
    trials: Sequence[Recipe] = ()  # of a sweep, which differ in `train` alone

    @property
    def model_name(self) -> str:
        """Name of the model in training, in the registry and in Prefect."""
        return self.recipe.publish.name

    def eval_inputs(self, images: Artifact, latents: Artifact) -> EvalInputs:
        """The inputs of an evaluation.

        A retraining measures on the champion's held-out pictures, where it encodes alike.
        """
        training = images
        if self.champion is not None:
            compared = self.champion.comparison_set(self.recipe, self.store, latents)
            images, latents = compared or (images, latents)
        models = (self.base, self.vae, self.measuring)
        return EvalInputs(self.recipe, images, latents, *models, training_images=training)

    def model_digests(self) -> dict[str, str]:
        """Model -> sha256 of the base, the VAE and the models that measure pictures.

        With the facts of the base's family.
        """
        of_base = model_digests(self.base, self.vae) | detect_family(self.base).key_facts
        return of_base | self.measuring.digests()

    def plan(self) -> download.DownloadPlan:
        """The shards of the source; a retraining keeps those of the champion.

        A run that was sent takes the plan of its sender: the source may have grown since. Another
        run records that it needs the plan before it looks for one. Raises DiskTooSmall, WrongInput.
        """
        if self.sent is None:
            found = download.plan(self.recipe, self.begin)
        else:
            (plan,) = self.results_before()
            found = download.planned(self.recipe, plan.load(self.store), self.begin)
        if self.champion is not None:
            found = plan_changes(self.recipe, self.store, self.champion, found)[0]
        continues = self.champion is not None and self.recipe.retrain.start == "champion"
        if train.STAGE in self.stages and not continues:  # that has steps of its own
            for one in self.trials or (self.recipe,):
                train.check_epochs(one.train, found.rows, "rows")
        keys = {shard.key for shard in found.shards}
        given = (self.recipe, self.store, self.base, self.vae)
        check_disk(*given, found.rows, self.stages, keys, self.trials)
        return found

    def champion_to_measure(self, trained: Artifact, evaluated: Artifact) -> Version | None:
        """The champion that the gate will compare the model with; None if there is no need of it.

        It is measured with the model, on the same device, before the publication needs its metrics.
        A run that was sent measures it if it was sent for nothing else.
        """
        given = (self.recipe, trained, evaluated, self.base, self.force)
        parts = publish.key_parts(*given)
        if self.sent is None:
            is_due = publish.STAGE in self.stages
            if not is_due or self.store.find(publish.STAGE, parts.key) is not None:
                return None
        elif self.sent.key == evaluated.key:
            return None
        return publish.compared_champion(self.recipe, parts.inputs)

    def champion_metrics(
        self, given: EvalInputs, evaluated: Artifact, before: Sequence[StageResult]
    ) -> Callable[[str], PublishedMetrics]:
        """A call that returns the metrics of a published version, comparable with `evaluated`.

        Args:
            before: the results that the evaluation was built from.
        """
        send = partial(self.send, before=before)
        return partial(metrics_of_published, given, evaluated, self.begin, send=send)

    def check_start_is_champion(self, model: str) -> None:
        """Raise StageFailed unless the champion is the start of a retraining, or its own model.

        Args:
            model: digest of its weights.
        """
        if self.champion is not None:
            check_start_is_champion(self.recipe, self.champion, model)

    def begin(self, parts: KeyParts) -> Progress:
        """Record that this run needs a stage; returns the progress of building it."""
        return begin(self.store, self.id, parts, self.model_name, {"recipe": dump(self.recipe)})

    def results_before(self) -> list[StageResult]:
        """The results that a sent stage is built from, in the order of the stages.

        The run records that it needs them before it looks for them. Raises StageFailed if one was
        deleted.
        """
        assert self.sent is not None
        keys = {stage: [key] for stage, key in self.sent.before.items()}
        with storing(self.store):
            record_run(self.store, self.id, {"recipe": dump(self.recipe), "stages": keys})
        stages = sorted(self.sent.before, key=("plan", *STAGES).index)
        return [
            StageResult.of_reused(self.store, stage, self.sent.before[stage]) for stage in stages
        ]

    def send(
        self, parts: KeyParts, progress: Progress, before: Sequence[StageResult | Artifact]
    ) -> Callable[[], str] | None:
        """A call that lets the stage's work pool build it; None for a stage that is built here.

        Of a run that was sent, the call raises if the artifact is not the one that is waited for.

        Args:
            before: what the stage is built from: results of the stages before, or the plan.
        """
        if self.sent is not None:
            return None if parts.key == self.sent.key else partial(self._fail, parts, self.sent)
        stage = next((one for one in PLACED_STAGES if one == progress.stage), None)
        if stage is None or stage not in self.recipe.place.pools():
            return None
        parameters = {
            "stage": stage,
            "settings": settings_to_send(self.recipe),
            "key": parts.key,
            "before": {one.stage: one.key for one in before},
            # Of a later stage the download exists: it must not be tried once more.
            "retry_run": self.retry_run if stage == "download" else None,
            "champion": self.champion and self.champion.version,
        }
        return partial(send_stage, self.recipe, self.store, stage, parameters, progress)

    def _fail(self, parts: KeyParts, sent: Sent) -> NoReturn:
        raise StageFailed(
            f"{sent.stage}: the sender expects {sent.key[:12]}, this run would build "
            f"{parts.key[:12]}: the models or the version of Kilnworks differ between sender and "
            "worker, or what the sender had built was deleted: run again"
        )
