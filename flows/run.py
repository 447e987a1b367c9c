"""A run of a checked recipe: what its stages are built from, and where.

`prepare` passes the doors with a recipe (tasks/preflight.py) and asks Prefect's server for work
pools. Before a server is started, what asks other machines is left out; `kiln doctor RECIPE` lists
what all doors find. A run builds its stages, or one stage that another run waits for; a retraining
starts from a champion.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from artifacts.gc import record_run
from artifacts.latent_shards import Latents
from artifacts.models import digest_model, resolve_model
from artifacts.store import Artifact, KeyParts, Store
from configs.checks import Check, enter
from configs.errors import Failed, Refused, naming_source
from configs.load_recipe import dump
from configs.settings.data import DrawnSource
from configs.settings.recipe import (
    DATA_STAGES,
    PLACED_STAGES,
    STAGES,
    PlacedStage,
    Recipe,
    StageName,
    with_defaults_without_effect,
)
from flows.run_in_terminal import configured_server, lasting_server
from flows.send_stage import check_deployments, send_stage
from runtimes.pipeline_folder.folder import Base
from tasks import download, train
from tasks.beam.workers import settings_to_send
from tasks.build_or_reuse import Before, Builder, Stage, StageResult, storing
from tasks.describe.describers import specs_of
from tasks.download.references import (
    REFERENCES,
    check_number,
    plan_references,
    recipe_of_references,
)
from tasks.drawn_source import DrawnStage
from tasks.evaluate.inputs import EvalInputs, MeasuringModels, model_digests
from tasks.evaluate.metrics import metric_names, most_rounds
from tasks.evaluate.published import PublishedMetrics, metrics_of_published
from tasks.plan.choose_memory import choose_memory
from tasks.plan.disk import check_disk
from tasks.preflight import Doors
from tasks.progress import Progress
from tasks.publish import stage as publish
from tasks.publish.gate_power import newest_estimates, undecidable
from tasks.publish.promotion_gate import check_rules, needs_pictures
from tasks.publish.registry import Version
from tasks.retrain.champion import Champion
from tasks.retrain.selection import plan_changes

log = logging.getLogger("kiln")


def prepare(
    recipe: Recipe,
    *,
    until: StageName = "publish",
    only: PlacedStage | None = None,
    run_id: str | None = None,
    retry_failed: bool = False,
    force: str | None = None,
) -> Run:
    """Pass the doors with a recipe; a stage with a work pool is checked on its worker.

    Args:
        only: the single stage that this run builds; default: all up to `until`.

    Raises:
        Refused: the recipe cannot run here.
        Away: a place or a model does not answer now.
    """
    recipe = choose_memory(recipe)
    stages = stages_until(recipe, until) if only is None else (only,)
    doors = Doors(recipe, stages)
    enter(checks_of(doors, force))
    run_id = run_id or str(uuid.uuid4())
    return Run(
        *(doors.recipe, Store(recipe.store), doors.opened.base, doors.opened.measuring, run_id),
        retry_run=run_id if retry_failed else None,
        force=force,
        stages=stages,
    )


def enter_before_server(
    recipe: Recipe, until: StageName = "publish", force: str | None = None
) -> None:
    """Pass the doors as far as no other machine is asked, and no model fetched."""
    doors = Doors(recipe, stages_until(recipe, until), fetch=False)
    enter(checks_of(doors, force), remote=False)


def stages_until(recipe: Recipe, last: StageName) -> Sequence[StageName]:
    """The stages up to the last one that a run builds. Raises Refused if the recipe lacks it."""
    if last not in recipe.stages:
        raise Refused(
            f"until: the recipe has no stage {last}: add a section `{last}`, or end at "
            f"{', '.join(recipe.stages[:-1])}"
        )
    return recipe.stages[: 1 + recipe.stages.index(last)]


def checks_of(doors: Doors, force: str | None = None) -> Iterator[Check]:
    """The checks of all doors, in order.

    Args:
        force: the reason to publish a model that fails the gate.
    """
    if force is not None and not force.strip():
        raise Refused("force: give a reason: the model card and the history name it")
    yield from doors.settings()
    is_sent = len(doors.here) < len(doors.built)
    if is_sent:
        yield Check("server", _need_lasting_server)
    yield from doors.places()
    if is_sent:
        yield Check("deployments", partial(_deployments, doors), remote=True)
    yield from doors.machine()
    yield from doors.models()


def _need_lasting_server() -> None:
    lasting_server("place: work pools need", ", or leave `place` out: all stages then run here")


def _deployments(doors: Doors) -> None:
    if configured_server() is not None:  # otherwise Prefect would start one for the question
        check_deployments(doors.recipe.place, doors.built)


def check_gate_rules(recipe: Recipe, latents: Latents) -> None:
    """Raise Refused for rules on metrics that these latents do not support.

    Rules that so few held-out pictures hardly decide are warned of.
    """
    count = latents.held_out
    share = f"encode.holdout {recipe.encode.holdout:g}"
    hint = f"{share} selected {count or 'none'} of these few pictures: raise it or remove the rule"
    known = metric_names(recipe, held_out=count)
    check_rules(recipe.publish.gate, known, recipe.evaluate.bootstrap, hint)
    if count:
        evaluated = newest_estimates(recipe, Store(recipe.store))
        for line in undecidable(recipe, evaluated, held_out=count):
            log.warning("%s", line)


@dataclass(frozen=True)
class Sent:
    """The one stage that a run builds for another run, on another machine."""

    stage: PlacedStage
    key: str  # of its artifact
    before: Mapping[str, str]  # stage -> key of the artifacts that it is built from
    rounds: int = 1  # of an evaluation
    references: bool = False  # whether a download is that of the references


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
    sent: Sent | None = None  # None: it builds all of them, each here or on its work pool
    trials: Sequence[Recipe] = ()  # the trials of a sweep, which differ in `train` alone
    champion: Champion | None = None  # that a retraining starts from
    whole: Recipe | None = None  # whose mixture has the source of this recipe
    source: str | None = None  # name of that source
    sends_references: bool = False  # whether a download that it sends is that of the references

    @property
    def model_name(self) -> str:
        """Name of the model in training, in the registry and in Prefect."""
        return self.recipe.publish.name

    @property
    def flow_stages(self) -> Sequence[str]:  # type: ignore[override]
        """The stages of the recipe."""
        return self.recipe.stages

    @property
    def facts(self) -> dict[str, Any]:
        """The recipe."""
        return {"recipe": dump(self.whole or self.recipe)}

    def of_source(self, name: str) -> Run:
        """The run's part that builds the data of one source of the mixture."""
        recipe = with_defaults_without_effect(self.recipe.of_source(name))
        stages = [stage for stage in self.stages if stage in DATA_STAGES]
        champion = self.champion and self.champion.of_source(name)
        part = replace(self, recipe=recipe, stages=stages, champion=champion)
        return replace(part, whole=self.recipe, source=name)

    @property
    def start(self) -> str | None:
        """Version of the champion that a retraining starts from."""
        return None if self.champion is None else self.champion.version

    @property
    def continues(self) -> bool:
        """Whether training continues from the weights of a champion."""
        return self.champion is not None and self.recipe.retrain.start == "champion"

    def send(self, parts: KeyParts, progress: Progress, before: Before) -> Callable[[], str] | None:
        """As `Builder.send`; of a run that was sent, a call that fails if another key is built."""
        if self.sent is not None:
            return None if parts.key == self.sent.key else partial(_fail, self.sent, parts)
        pools = self.recipe.place.pools()
        stage = next((placed for placed in PLACED_STAGES if placed == progress.stage), None)
        if stage is None or stage not in pools:
            return None
        parameters = {
            "stage": stage,
            "settings": settings_to_send(self.recipe),
            "key": parts.key,
            "before": {result.stage: result.key for result in before if result is not None},
            # At a later stage the download exists: it must not be tried once more.
            "retry_run": self.retry_run if stage == "download" else None,
            "champion": self.start,
            "source": self.source,
            "rounds": 1 + len(parts.settings.get("more_rounds", ())),
            "references": self.sends_references,
        }
        about = (pools[stage], self.model_name, self.store, stage)
        return partial(send_stage, *about, parameters, progress)

    def load(self, *results: StageResult | None) -> list[Any]:
        """The artifact of each result, None of none. Raises Failed if one was deleted."""
        return [None if result is None else result.load(self.store) for result in results]

    def results_before(self) -> list[StageResult]:
        """The results that a sent stage is built from, in the order of the stages.

        The run records that it needs them before it looks for them. Raises Failed if a result was
        deleted.
        """
        assert self.sent is not None
        before = self.sent.before
        keys = {stage: [key] for stage, key in before.items()}
        with storing(self.store):
            record_run(self.store, self.id, {**self.facts, "stages": keys})
        stages = sorted(before, key=("plan", REFERENCES, *STAGES).index)
        return [StageResult.of_reused(self.store, stage, before[stage]) for stage in stages]

    def with_drawn_source(self) -> Run:
        """The run with a folder as its source, of what the base draws; drawn or reused now."""
        source = self.recipe.source
        if not isinstance(source, DrawnSource):
            return self
        stage = DrawnStage(self.recipe, source, self.base)
        drawn = self.build(stage)
        self.ended(drawn, stage.show)
        folder = stage.folder(drawn.load(self.store))
        return replace(self, recipe=self.recipe.model_copy(update={"source": folder}))

    def plan(self) -> download.DownloadPlan:
        """The shards of the source. Raises Refused.

        The run records that it needs the plan before it looks. A sent run has its sender's: the
        source may have grown since. A retraining keeps the champion's shards.
        """
        plan = self.planned_rows()
        most = plan.artifact.summary.get("most_references", 0)
        with naming_source(self.source or ""):
            check_number(self.base.family, most, "a picture has")
        if train.STAGE in self.stages and not self.continues:  # that has steps of its own
            for recipe in self.trials or (self.recipe,):
                train.check_epochs(recipe.train, plan.rows, "rows")
        keys = {shard.key for shard in plan.shards}
        about = (self.recipe, self.store, self.base)
        references = self.stage_of_references(plan)
        count = 0 if references is None else references.plan.rows
        check_disk(*about, plan.rows, self.stages, keys, self.trials, count)
        return plan

    def planned_rows(self) -> download.DownloadPlan:
        """As `plan`, without the checks of what they need."""
        if self.sent is None:
            plan = download.plan(self.recipe, self.begin)
        else:
            (planned,) = self.results_before()
            plan = download.planned(self.recipe, planned.load(self.store), self.begin)
        return plan_changes(self.recipe.download, self.store, self.champion, plan)[0]

    def stage_of_references(self, plan: download.DownloadPlan) -> download.DownloadStage | None:
        """The download of the references of a plan's rows; None if they have none."""
        if not self.recipe.has_references:
            return None
        recipe = recipe_of_references(self.recipe)
        if (own := plan_references(recipe, plan, self.begin)) is None:
            return None
        return download.DownloadStage.of(recipe, own, self.store, self.retry_run)

    @property
    def rounds(self) -> Iterator[int]:
        """The numbers of rounds after which the gate may look at an evaluation, ascending.

        A run that publishes nothing, or by force, has one round.
        """
        if self.sent is not None:
            return iter((self.sent.rounds,))
        is_judged = publish.STAGE in self.stages and self.force is None
        return iter(range(1, 1 + (most_rounds(self.recipe.evaluate) if is_judged else 1)))

    def eval_inputs(self, images: Artifact, latents: Artifact, rounds: int = 1) -> EvalInputs:
        """The inputs of an evaluation; a retraining has the champion's, where it encodes alike."""
        measuring = self.measuring
        data = EvalInputs(self.recipe, images, latents, self.base, measuring, rounds=rounds)
        if self.champion is None:
            return data
        compared = self.champion.comparison_set(self.recipe, self.store, latents)
        images, latents = compared or (images, latents)
        return replace(
            data,
            images=images,
            latents=latents,
            training_images=data.images,
            training_latents=data.latents,
        )

    def model_digests(self) -> dict[str, str]:
        """Model -> sha256 of the base, the VAE and the models that describe, caption and measure.

        With the facts of the base's family.
        """
        digests = model_digests(self.base) | self.base.family.key_facts
        digests |= self.measuring.digests()
        for name, part in self.recipe.by_source.items():
            if part.describe is not None:
                specs = specs_of(part.describe, part.download.max_pixels)
                digests |= {f"describer {n} {name}".rstrip(): s.digest for n, s in specs.items()}
            caption = part.caption
            if caption is not None and caption.endpoint is None:
                folder = resolve_model(caption.model, revision=caption.revision)
                digests[f"captioner {name}".rstrip()] = digest_model(folder)
        return digests

    def passed_look(self, looks: Sequence[Stage]) -> int:
        """The index of the evaluation by which the model was published; 0 if it was not.

        By fewer pictures it would be compared with itself.
        """
        if len(looks) == 1:
            return 0
        versions = publish.registry_of(self.recipe).versions()
        published = {v.manifest["run"]["parents"]["evaluation"]["key"] for v in versions}
        return next((n for n, look in enumerate(looks) if look.parts.key in published), 0)

    def needs_pictures(
        self,
        data: EvalInputs,
        trained: Artifact,
        evaluated: Artifact,
        before: Sequence[StageResult],
    ) -> bool:
        """Whether more pictures may let the model pass the gate.

        Args:
            before: the results of the stages before the evaluation.
        """
        metrics = self.champion_metrics(data, evaluated, before)
        about = (self.recipe, self.base, trained, evaluated)
        model = publish.PublishStage(*about, champion_metrics=metrics)
        return needs_pictures(model.judged(model.parts.inputs)[0])

    def champion_to_measure(self, trained: Artifact, evaluated: Artifact) -> Version | None:
        """The champion that the gate will compare the model with; None if there is no need of it.

        It is measured with the model, on the same device, before the publication needs its metrics.
        A sent run measures it if it was sent for that alone: the evaluation of the model is there.
        """
        model = publish.PublishStage(self.recipe, self.base, trained, evaluated, self.force)
        if self.sent is not None:
            is_due = self.sent.key != evaluated.key
        else:
            will_publish = publish.STAGE in self.stages
            is_due = will_publish and self.store.find(publish.STAGE, model.parts.key) is None
        return model.compared_champion() if is_due else None

    def champion_metrics(
        self, data: EvalInputs, evaluated: Artifact, before: Sequence[StageResult]
    ) -> Callable[[str], PublishedMetrics]:
        """A call that returns the metrics of a published version, comparable with `evaluated`.

        Args:
            before: the results of the stages before the evaluation.
        """
        return partial(metrics_of_published, data, evaluated, partial(self.build, before=before))


def _fail(sent: Sent, parts: KeyParts) -> NoReturn:
    raise Failed(
        f"{sent.stage}: the sender expects {sent.key[:12]}, this run would build "
        f"{parts.key[:12]}: the models or the version of Kilnworks differ between sender and "
        "worker, or what the sender had built was deleted: run again"
    )
