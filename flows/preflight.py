"""Checks of a recipe before the first stage, and before training."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from artifacts.artifact_key import KeyParts
from artifacts.download_or_find_model import ModelNotFound, local_model, resolve_file, resolve_model
from artifacts.latent_shards import Latents
from artifacts.run_records import record_run
from artifacts.store import Artifact, Store
from configs.load_and_extend_recipe import RecipeError, dump
from configs.settings.best_checkpoint import HOLDOUT_LOSS
from configs.settings.place import PLACED_STAGES, PlacedStage
from configs.settings.recipe import STAGES, Recipe, StageName
from configs.settings.train import Train
from flows.check_disk import check_disk
from flows.send_stage import check_deployments, send_stage
from flows.task_states import begin
from runtimes import check_support
from runtimes.families import detect_family
from runtimes.families.inpainting_and_scores import ExtraInputs
from runtimes.hosts.detect_nvidia import usable_gpus
from runtimes.objective.resolution_shift import ResolutionShift
from runtimes.objective.sample_and_scale_latents import LatentScale
from runtimes.objective.scheduler_config import (
    read_schedule,
    read_scheduler_config,
    scheduler_config,
    trained_scheduler_config,
)
from runtimes.objective.training_objective import Objective
from runtimes.pipeline_folder.denoiser_config import folder_extras
from runtimes.pipeline_folder.describe_encoders import describe_encoders, vae_path
from runtimes.pipeline_folder.describe_encoders import read_config as read_model_config
from runtimes.train.wandb_tracker import check_wandb
from tasks import check_training_targets, download
from tasks.beam_workers import BEAM_STAGES, Workers, beam_options, check_workers, workers_of
from tasks.build_or_reuse import StageFailed, StageResult, storage_error, storing
from tasks.check_places import check_places, settings_to_send
from tasks.encode.buckets import bucket_sizes
from tasks.encode.decode_and_crop import TransformSettings
from tasks.evaluate import holdout_loss
from tasks.evaluate import stage as evaluate
from tasks.evaluate.evaluation_inputs import EvalInputs, measuring_models, model_digests
from tasks.evaluate.feature_encoders import check_clip, check_image_encoder
from tasks.evaluate.inception import check_inception
from tasks.evaluate.metric_names import metric_names
from tasks.evaluate.score_training_samples import sample_metrics
from tasks.gpu.gpu_training_plan import check_fits
from tasks.progress import Progress
from tasks.publish import stage as publish
from tasks.publish.assemble_pipeline import missing_weights, pipeline_weight_files
from tasks.publish.model_card import UNKNOWN_LICENSE, license_conflict, shown_license
from tasks.publish.model_registry import Version
from tasks.publish.promotion_gate import check_rules, parse_rule
from tasks.publish.sign_model import check_key
from tasks.retrain.champion import Champion, check_champion
from tasks.retrain.source_changes import plan_changes
from tasks.tpu import launch

log = logging.getLogger("kiln")


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
    clip: Path
    id: str  # of the flow run
    image_encoder: Path | None = None  # vision model of the metrics; None: clip
    preference_models: Mapping[str, Path] = field(default_factory=dict)  # judge -> CLIPModel folder
    inception: Path | None = None  # weights file; None: no metrics of Inception
    retry_run: str | None = None  # the run that fetches rows with transient failures again
    champion: Champion | None = None  # the champion that a retraining starts from
    force: str | None = None  # the reason to publish a model that fails the gate
    stages: Sequence[StageName] = STAGES  # those that it builds
    sent: Sent | None = None  # what another run waits for; None: the run builds `stages`

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
        models = (self.base, self.vae, *self._measuring)
        return EvalInputs(self.recipe, images, latents, *models, training_images=training)

    def model_digests(self) -> dict[str, str]:
        """Model -> sha256 of the base, the VAE and the models that measure pictures."""
        return model_digests(self.base, self.vae) | measuring_models(*self._measuring)

    @property
    def _measuring(self) -> tuple[Path, Path | None, Mapping[str, Path], Path | None]:
        return self.clip, self.image_encoder, self.preference_models, self.inception

    def plan(self) -> download.DownloadPlan:
        """The shards of the source; a retraining keeps those of the champion.

        A run that was sent takes the plan of its sender: the source may have grown since. Another
        run records that it needs the plan before it looks for one. Raises DiskTooSmall.
        """
        if self.sent is None:
            found = download.plan(self.recipe, self.begin)
        else:
            (plan,) = self.results_before()
            found = download.planned(self.recipe, plan.load(self.store), self.begin)
        if self.champion is not None:
            found = plan_changes(self.recipe, self.store, self.champion, found)[0]
        keys = {shard.key for shard in found.shards}
        given = (self.recipe, self.store, self.base, self.vae)
        check_disk(*given, rows=found.rows, stages=self.stages, shards=keys)
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
    ) -> Callable[[str], evaluate.PublishedMetrics]:
        """A call that returns the metrics of a published version, comparable with `evaluated`.

        Args:
            before: the results that the evaluation was built from.
        """
        send = partial(self.send, before=before)
        return partial(evaluate.metrics_of_published, given, evaluated, self.begin, send=send)

    def check_champion(self, model: str) -> None:
        """Raise StageFailed unless the champion is the start of a retraining, or its own model.

        Args:
            model: digest of its weights.
        """
        if self.champion is not None:
            check_champion(self.recipe, self.champion, model)

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


def prepare(
    recipe: Recipe,
    *,
    until: StageName = "publish",
    only: PlacedStage | None = None,
    run_id: str | None = None,
    retry_failed: bool = False,
    force: str | None = None,
) -> Run:
    """Check a recipe's places, models, settings and, for the stages up to `until`, devices.

    Devices of stages with a work pool are checked there.

    Args:
        only: the single stage that this run builds; default: all up to `until`.

    Raises:
        RecipeError, GateError, ModelNotFound, SourceError, WrongInput: the recipe cannot run here.
    """
    if force is not None and not force.strip():
        raise RecipeError("force: give a reason: the model card and the history name it")
    check_rules(recipe.publish.gate, metric_names(recipe), recipe.evaluate.bootstrap)
    if recipe.publish.signing_key is not None:
        check_key(recipe.publish.signing_key)
    store = writable_store(recipe)
    built = STAGES[: 1 + STAGES.index(until)] if only is None else (only,)
    stages = _stages_here(recipe, built)
    _check_runtime(recipe, stages)
    if "train" in stages:
        if recipe.tpu is not None:
            launch.check(recipe.tpu, recipe.store, recipe.train)
        _check_monitoring(recipe)
        _warn_of_a_long_warmup(recipe.train)
    if "download" in built:  # a sent stage may be on a pool that does not reach the source
        download.check(recipe)
    evaluate.check(recipe)
    _check_workers(recipe, stages)
    model, vae = _check_models(recipe)
    if "train" in stages:
        _check_memory(recipe, model, vae)
    _check_license(recipe, model)
    run_id = run_id or str(uuid.uuid4())
    return Run(
        *(recipe, store, model, vae),
        **_check_measuring_models(recipe, stages),
        id=run_id,
        retry_run=run_id if retry_failed else None,
        force=force,
        stages=built,
    )


def _stages_here(recipe: Recipe, stages: Sequence[StageName]) -> Sequence[StageName]:
    """The stages that are not sent to a work pool. Raises RecipeError for one that cannot be."""
    check_places(recipe, stages)
    check_deployments(recipe, stages)
    return stages_without_pool(recipe, stages)


def stages_without_pool(recipe: Recipe, stages: Sequence[StageName] = STAGES) -> list[StageName]:
    """The stages that are built on this machine."""
    return [stage for stage in stages if stage not in recipe.place.pools()]


def devices_here(recipe: Recipe, stages: Sequence[StageName]) -> dict[str, str]:
    """Setting -> device of the stages that compute on this machine."""
    computing = [stage for stage in stages if stage in ("encode", "train", "evaluate")]
    if "encode" in computing and workers_of(beam_options(recipe, "encode")) is Workers.REMOTE:
        computing.remove("encode")  # its device is on machines that cannot be asked
    return {f"{stage}.device": getattr(recipe, stage).device for stage in computing}


def must_fit_one_gpu(recipe: Recipe) -> bool:
    """Whether training needs the memory of `memory_of` on one GPU, if there is one."""
    settings = recipe.train
    on_gpu = settings.device.partition(":")[0] in ("auto", "cuda")
    sharded = settings.fsdp != 1 and settings.processes > 1
    return recipe.runtime == "torch" and on_gpu and not sharded


def check_gate_rules(recipe: Recipe, latents: Latents) -> None:
    """Raise GateError for rules on metrics that these latents do not support."""
    count = latents.held_out
    share = f"encode.holdout {recipe.encode.holdout:g}"
    hint = f"{share} selected {count or 'none'} of these few pictures: raise it or remove the rule"
    known = metric_names(recipe, held_out=count)
    check_rules(recipe.publish.gate, known, recipe.evaluate.bootstrap, hint)


def check_locations(recipe: Recipe) -> None:
    """Check the store and the local folders of models: what takes no time.

    Raises:
        RecipeError, ModelNotFound: one of them is missing, or cannot be written.
    """
    writable_store(recipe)
    for setting, path in (
        ("model.path", recipe.model.path),
        ("evaluate.clip", recipe.evaluate.clip),
    ):
        with _naming(setting):
            local_model(path)


def writable_store(recipe: Recipe) -> Store:
    """The store; it and the registry can be written. Raises RecipeError for one that cannot."""
    store = Store(recipe.store)
    places, other = {"store": store}, recipe.publish.registry
    if other is not None:
        places["publish.registry"] = Store(other)
    for setting, place in places.items():
        try:
            place.check_writable()
        except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
            why = f"no folder can be made at {place.url} ({error.strerror}): choose another"
            raise RecipeError(f"{setting}: {why}") from None
        except Exception as error:
            converted = storage_error(place, error)
            if converted is error and not isinstance(error, OSError):
                raise
            raise RecipeError(f"{setting}: {converted}") from error
    return store


def _check_runtime(recipe: Recipe, stages: Sequence[StageName]) -> None:
    if not {"encode", "train", "evaluate"} & set(stages):
        return
    check_support.check_installed(recipe.runtime)
    asked = devices_here(recipe, stages)
    settings = recipe.train
    unsure = (
        recipe.runtime != "torch",  # it refuses some settings
        settings.processes > 1 and settings.device != "cpu",
        settings.fsdp not in (1, "all"),
        settings.optimizer == "adamw_8bit",
        settings.compile not in ("auto", "none"),
        settings.attention != "auto" or settings.cuda_graphs or settings.allow_tf32,
    )
    if set(asked.values()) <= {"auto", "cpu"} and not any(unsure):
        return  # always available; a probe would import the runtime, which takes seconds
    check_support.check_devices(recipe.runtime, asked)
    if "train" in stages:
        if recipe.tpu is not None:  # launch.check compares it with the chips of the slice
            settings = settings.model_copy(update={"fsdp": 1})
        check_support.check_settings(recipe.runtime, settings)


def _check_workers(recipe: Recipe, stages: Sequence[StageName]) -> None:
    """Raise BeamOptionsError or RecipeError for Beam options or workers that cannot work."""
    for options in filter(None, (beam_options(recipe, stage) for stage in BEAM_STAGES)):
        from tasks.beam_options import check_options  # seconds to import

        check_options(options)
    check_workers(recipe, stages)


def _warn_of_a_long_warmup(settings: Train) -> None:
    warmup, steps = settings.lr_warmup_steps, settings.steps
    if settings.epochs is None and warmup > steps:
        words = "train.lr_warmup_steps: %d exceed the %d steps: the learning rate misses its peak"
        log.warning(words, warmup, steps)


def _check_monitoring(recipe: Recipe) -> None:
    """Raise RecipeError or WrongInput for a tracker or a held-out loss that cannot work."""
    check_wandb(recipe.train.wandb)
    if recipe.train.holdout_loss.every_n_steps and not recipe.encode.holdout:
        raise RecipeError("train.holdout_loss needs held-out samples: raise encode.holdout")
    rule = recipe.train.best_checkpoint
    known = [HOLDOUT_LOSS, *sample_metrics(recipe.evaluate.judges)]
    if rule is not None and rule.metric not in known:
        raise RecipeError(
            f"train.best_checkpoint.metric: {rule.metric} is not scored while training; it scores "
            f"{', '.join(known)}"
        )


def _check_models(recipe: Recipe) -> tuple[Path, Path | None]:
    """Check the models; returns the base's folder and that of a separate VAE, if any."""
    model = _resolved("model.path", recipe.model.path, recipe.model.revision)
    vae = _resolved("model.vae", recipe.model.vae) if recipe.model.vae else None
    found = describe_encoders(model, vae)
    for device in (recipe.train.device, recipe.evaluate.device):
        check_support.check_family(recipe.runtime, found["family"], device)
    factor = found["size_step"]
    bucket_sizes(TransformSettings.of(recipe), factor)
    evaluate.check_drawn_size(recipe, model, vae)
    _check_weights(model, vae)
    _check_objective(recipe, model)
    own = read_scheduler_config(model / "scheduler")
    for config in (own, scheduler_config(own, recipe.train)):  # both models are drawn
        check_support.check_scheduler(recipe.runtime, config, recipe.evaluate.scheduler)
    check_training_targets.check(recipe, model)
    return model, None if vae is None else vae_path(model, vae)


def _resolved(setting: str, path: str, revision: str | None = None) -> Path:
    """A model's local folder. Raises ModelNotFound, with the setting's name."""
    with _naming(setting):
        return resolve_model(path, revision=revision)


@contextmanager
def _naming(setting: str) -> Iterator[None]:
    """Put the setting's name before the message of a ModelNotFound."""
    try:
        yield
    except ModelNotFound as error:
        raise type(error)(f"{setting}: {error}") from None


def _check_measuring_models(recipe: Recipe, stages: Sequence[StageName]) -> dict[str, Any]:
    """Check the models that measure pictures; returns their folders and the weights file."""
    settings = recipe.evaluate
    clip, encoder = _resolved("evaluate.clip", settings.clip), None
    check_clip(clip)
    if settings.image_encoder is not None:
        encoder = _resolved("evaluate.image_encoder", settings.image_encoder)
        check_image_encoder(encoder)
    judges = {
        name: _resolved(f"evaluate.judges.{name}", path)
        for name, path in settings.preference_models.items()
    }
    for name, folder in judges.items():
        check_clip(folder, f"evaluate.judges.{name}")
    inception = None
    if settings.inception is not None:
        inception = resolve_file(settings.inception)
        if "evaluate" in stages:
            check_inception(inception, settings.inception)
    found = {"clip": clip, "image_encoder": encoder, "preference_models": judges}
    return {**found, "inception": inception}


def _check_license(recipe: Recipe, base: Path) -> None:
    if recipe.publish.require_license and shown_license(recipe, base) == UNKNOWN_LICENSE:
        raise RecipeError(
            "publish.require_license: neither publish.license nor the base's card has a licence"
        )
    if (conflict := license_conflict(recipe, base)) is not None:
        log.warning("%s", conflict)


def _check_memory(recipe: Recipe, model: Path, vae: Path | None) -> None:
    """Raise WrongInput if training by runtime torch cannot fit the largest GPU of this machine."""
    if must_fit_one_gpu(recipe) and (found := usable_gpus()):
        check_fits(recipe, model, vae, max(gpu.memory for gpu in found))


def _check_weights(model: Path, vae: Path | None) -> None:
    missing = [part for part in missing_weights(model) if part != "vae" or vae is None]
    if missing:
        raise ModelNotFound(f"model {model}: no .safetensors weights in {', '.join(missing)}")
    if vae is not None and not pipeline_weight_files(folder := vae_path(model, vae)):
        raise ModelNotFound(f"model.vae {folder}: it has no .safetensors weights")


def _check_objective(recipe: Recipe, model: Path) -> None:
    """Raise WrongInput for train settings that contradict the base or each other."""
    folder, family = model / "scheduler", detect_family(model)
    denoiser = model / family.denoiser
    patch = family.latent_multiple(read_model_config(denoiser / "config.json"))
    shift = ResolutionShift.from_config(read_scheduler_config(folder), patch)
    Objective.of(recipe.train, read_schedule(folder, recipe.train), LatentScale(1.0), shift)
    if recipe.encode.holdout:  # evaluation computes the base's loss
        Objective(read_schedule(folder), LatentScale(1.0), seed=0)
    if trained_scheduler_config(folder, recipe.train) is not None:
        why = "the scheduler (train.prediction_type or train.zero_terminal_snr)"
    elif folder_extras(denoiser) != ExtraInputs.from_settings(recipe.train):
        why = "the inputs (train.inpainting or train.aesthetic_score)"
    else:
        return
    for rule in map(parse_rule, recipe.publish.gate):
        if rule.metric.startswith(holdout_loss.NAME) and rule.model == "base":
            raise RecipeError(
                f"publish.gate: {rule.text!r} compares incomparable losses, since {why} "
                "of the tuned model differ from the base's: remove the rule"
            )
