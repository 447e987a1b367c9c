"""A run of a checked recipe: what its stages are built from, and where.

Disk and time are estimated before a run starts; one that a local disk cannot hold is refused.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from artifacts.gc import record_run
from artifacts.store import MANIFEST, Artifact, KeyParts, Store
from configs.errors import Failed, Refused
from configs.load_recipe import dump
from configs.settings.recipe import PLACED_STAGES, STAGES, PlacedStage, Recipe, StageName
from flows.prefect_run import begin
from flows.send_stage import send_stage
from runtimes.hosts.host import find_gpus
from runtimes.pipeline_folder.folder import Base
from runtimes.torch_models.gpu_specs import known_gpu
from tasks import download, train
from tasks.beam.workers import settings_to_send
from tasks.encode.transform import STAGE as ENCODE
from tasks.evaluate.inputs import EvalInputs, MeasuringModels, model_digests
from tasks.evaluate.published import PublishedMetrics, metrics_of_published
from tasks.plan.gpu import TYPICAL_MFU, memory_of
from tasks.plan.plan import DiskEstimate, estimate_disk
from tasks.progress import Progress, bytes_in_words
from tasks.publish import stage as publish
from tasks.publish.registry import Version
from tasks.retrain.champion import Champion, check_start_is_champion
from tasks.retrain.changes import plan_changes
from tasks.stage import StageResult, storing

log = logging.getLogger("kiln")


def check_disk(
    recipe: Recipe,
    store: Store,
    base: Base,
    rows: int,
    stages: Sequence[StageName],
    shards: Collection[str],
    trials: Sequence[Recipe] = (),
) -> None:
    """Log what a run needs, and raise Refused if a local store's disk cannot hold it.

    What is stored needs no space; it is counted only where the disk cannot hold the whole run.

    Args:
        rows: of the source.
        stages: those that the run builds.
        shards: keys of the planned shards.
        trials: recipes of a sweep.

    Raises:
        Refused: the base's configs are invalid.
    """
    whole = left = estimate_disk(recipe, base, rows, stages, trials)
    needed, words = _needed(recipe.plan.disk_gb, whole, left)
    free = free_bytes(store)
    if free is not None and needed > free:
        left = whole.without_stored(_missing(store, stages, shards))
        needed, words = _needed(recipe.plan.disk_gb, whole, left)
    there = "" if free is None else f", {bytes_in_words(free)} are free"
    time = training_time(trials or (recipe,)) if left.stages.get("train") else None
    log.info(
        "estimate: %s rows, at most %s of disk%s (%s)%s",
        f"{rows:,}",
        bytes_in_words(needed),
        there,
        words,
        "" if time is None else f"; {time}",
    )
    if free is not None and needed > free:
        raise Refused(_refusal(store, needed, words, free))


def training_time(recipes: Sequence[Recipe]) -> str | None:
    """Duration of the trainings on this machine's GPU, in words; None if a rate is not known."""
    plans = [plan for plan in map(memory_of, recipes) if plan is not None]
    on_gpu = recipes[0].train.device.partition(":")[0] in ("auto", "cuda")
    gpus = find_gpus() if len(plans) == len(recipes) and on_gpu else []
    spec = known_gpu(gpus[0].name) if gpus else None
    if spec is None:
        return None
    hours = [found for plan in plans if (found := plan.hours(spec)) is not None]
    if len(hours) < len(plans):
        return None
    return f"training about {sum(hours):,.1f} h on {spec.name} (at {TYPICAL_MFU:.0%} of its peak)"


def _needed(by_hand: float | None, whole: DiskEstimate, left: DiskEstimate) -> tuple[int, str]:
    """Bytes still needed, and their parts in words; `plan.disk_gb` replaces the whole estimate."""
    if by_hand is None:
        return left.total, left.words
    share = left.total / whole.total if whole.total else 0.0
    return int(by_hand * 1e9 * share), f"plan.disk_gb {by_hand:g}, {1 - share:.0%} of it stored"


def _missing(
    store: Store, stages: Sequence[StageName], shards: Collection[str]
) -> dict[StageName, float]:
    """The share of each stage that a local store lacks.

    Latent shards are counted, since their keys are not known yet. Once all pictures are there, a
    later stage that the store has, begun or finished, counts as this run's.
    """
    missing: dict[StageName, float] = dict.fromkeys(stages, 1.0)
    if not store.is_local or not shards:
        return missing
    there = set(_shard_names(store, download.STAGE))
    pictures = sum(key not in there for key in shards) / len(shards)
    latents = max(0.0, 1 - sum(1 for _ in _shard_names(store, ENCODE)) / len(shards))
    found: dict[StageName, float] = {"download": pictures, "encode": latents}
    if not pictures:
        # A shard without good pictures has no latents.
        found |= {"encode": 0.0} if _has_artifact(store, "encode", MANIFEST) else {}
        later: tuple[StageName, ...] = ("train", "evaluate", "publish")
        found |= {stage: 0.0 for stage in later if _has_artifact(store, stage)}
    return {stage: found.get(stage, 1.0) for stage in stages}


def _shard_names(store: Store, stage: str) -> Iterator[str]:
    """Keys of a stage's shards in a local store."""
    folder = store.shards_path(stage)
    if os.path.isdir(folder):
        with os.scandir(folder) as entries:
            names = (entry.name for entry in entries)
            yield from (name[: -len(".json")] for name in names if name.endswith(".json"))


def _has_artifact(store: Store, stage: StageName, file: str = "") -> bool:
    """Whether a local store has an artifact of the stage, with `file` in it."""
    folder = Path(store.root) / stage
    keys = os.listdir(folder) if folder.is_dir() else []
    return any(len(key) == 64 and (folder / key / file).exists() for key in keys)


def free_bytes(store: Store) -> int | None:
    """Free bytes of a local store's disk; None for a bucket, whose limits are not known."""
    if not store.is_local:
        return None
    folder = next(path for path in (Path(store.root), *Path(store.root).parents) if path.is_dir())
    return shutil.disk_usage(folder).free


def _refusal(store: Store, needed: int, words: str, free: int) -> str:
    return (
        f"store {store.url}: the run needs about {bytes_in_words(needed)} ({words}), and its "
        f"disk has {bytes_in_words(free)} free: free some (`kiln gc`), set `store` to another "
        "place, lower encode.resolution or the rows, or correct the estimate by plan.disk_gb"
    )


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
    base: Base
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
        return EvalInputs(self.recipe, images, latents, self.base, self.measuring, training)

    def model_digests(self) -> dict[str, str]:
        """Model -> sha256 of the base, the VAE and the models that measure pictures.

        With the facts of the base's family.
        """
        of_base = model_digests(self.base) | self.base.family.key_facts
        return of_base | self.measuring.digests()

    def plan(self) -> download.DownloadPlan:
        """The shards of the source; a retraining keeps those of the champion.

        A run that was sent takes the plan of its sender: the source may have grown since. Another
        run records that it needs the plan before it looks for one. Raises Refused.
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
        given = (self.recipe, self.store, self.base)
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
        """Raise Failed unless the champion is the start of a retraining, or its own model.

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

        The run records that it needs them before it looks for them. Raises Failed if one was
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
        raise Failed(
            f"{sent.stage}: the sender expects {sent.key[:12]}, this run would build "
            f"{parts.key[:12]}: the models or the version of Kilnworks differ between sender and "
            "worker, or what the sender had built was deleted: run again"
        )
