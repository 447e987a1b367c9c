"""Checks of a recipe and its models before the first stage, and before training.

The models are the base, its VAE, and those that measure.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from artifacts.latent_shards import Latents
from artifacts.models import check_on_hub, local_model, resolve_file, resolve_model
from artifacts.store import Store
from configs.errors import Away, Refused
from configs.settings.data import Source
from configs.settings.recipe import (
    STAGES,
    PlacedStage,
    Recipe,
    StageName,
    warnings_without_effect,
    with_defaults_without_effect,
)
from configs.settings.train_parts import HOLDOUT_LOSS
from flows.run import Run
from flows.send_stage import check_deployments
from runtimes import registry
from runtimes.families.extra_inputs import ExtraInputs
from runtimes.hosts.host import host_memory, usable_gpus
from runtimes.objective.noise_schedule import (
    ResolutionShift,
    schedule_facts,
    scheduler_config,
)
from runtimes.objective.training_objective import LatentScale, Objective
from runtimes.pipeline_folder.folder import Base, replacement_config
from runtimes.pipeline_folder.weights import check_tokenizers, check_weights, stored_weight_files
from runtimes.train.trackers import check_wandb
from tasks import download, tpu, train
from tasks.beam.workers import (
    BEAM_STAGES,
    Workers,
    beam_options,
    check_places,
    check_workers,
    is_hub_id,
    workers_of,
)
from tasks.encode.transform import TransformSettings, bucket_sizes
from tasks.evaluate import stage as evaluate
from tasks.evaluate.features import check_clip, check_image_encoder
from tasks.evaluate.inception import check_inception
from tasks.evaluate.inputs import MeasuringModels
from tasks.evaluate.metrics import metric_names, sample_metrics
from tasks.plan.gpu import check_fits
from tasks.publish import stage as publish
from tasks.publish.assemble import model_parts
from tasks.publish.hub import check_key
from tasks.publish.model_card import UNKNOWN_LICENSE, license_conflict, shown_license
from tasks.publish.promotion_gate import check_rules, parse_rule, warnings_of_few_prompts
from tasks.stage import storage_error
from tasks.train import warn_of_warmup


def check_models(recipe: Recipe) -> Base:
    """The base, opened with the recipe's VAE and checked."""
    model = _resolved("model.path", recipe.model.path, recipe.model.revision)
    vae = _resolved("model.vae", recipe.model.vae) if recipe.model.vae else None
    with _naming("model.path" if vae is None else "model.path or model.vae"):
        base = Base.open(model, vae)
        factor = base.encoders["size_step"]
    for device in (recipe.train.device, recipe.evaluate.device):
        registry.check_family(recipe.runtime, base.family.name, device)
    largest = max(map(max, bucket_sizes(TransformSettings.of(recipe), factor)))
    _check_position_embeddings(recipe, base, largest, factor)
    evaluate.check_drawn_size(recipe, base)
    _check_weights(base)
    check_tokenizers(base)
    _check_objective(recipe, base)
    _check_schedulers(recipe, base)
    train.check(recipe, base)
    return base


def _check_position_embeddings(recipe: Recipe, base: Base, largest: int, factor: int) -> None:
    """Raise Refused for pictures whose sides exceed a denoiser's table of positions (SD3).

    Args:
        largest: the longest side of a bucket, in pixels.
        factor: pixels per position.
    """
    settings = recipe.train
    drawn = recipe.evaluate
    instead = replacement_config(settings)
    trained = base.denoiser if instead is None else instead
    draws = max(drawn.height or 0, drawn.width or 0)
    checks = (
        ("encode.resolution", largest, trained),
        ("evaluate.height and width", draws, base.denoiser),
        ("evaluate.height and width", draws, trained),
    )
    for setting, side, config in checks:
        most = config.get("pos_embed_max_size")
        if most is not None and side > most * factor:
            raise Refused(
                f"{setting}: sides of {side} pixels exceed the {most * factor} of the model's "
                "position embeddings: lower them, or encode.max_aspect"
            )


def _check_weights(base: Base) -> None:
    """Raise Refused for weights that are missing, damaged or others."""
    vae = base.vae_folder
    parts = [part for part in model_parts(base) if part != vae]
    missing = [part.name for part in parts if not stored_weight_files(part)]
    if missing:
        raise Refused(
            f"model.path {base.folder}: no .safetensors weights in {', '.join(missing)}: fetch "
            "them, or convert other files"
        )
    if vae is not None and not stored_weight_files(vae):
        raise Refused(f"model.vae {vae}: it has no .safetensors weights")
    for part in parts if vae is None else [*parts, vae]:
        check_weights(part)


def _check_objective(recipe: Recipe, base: Base) -> None:
    """Raise Refused for train settings that contradict the base or each other."""
    patch = base.family.latent_multiple(base.denoiser)
    shift = ResolutionShift.from_config(base.scheduler, patch)
    tuned = base.schedule(recipe.train)
    Objective.of(recipe.train, tuned, LatentScale(1.0), shift)
    if recipe.encode.holdout:  # evaluation computes the base's loss
        Objective(base.schedule(), LatentScale(1.0), seed=0)
    if schedule_facts(base.schedule()) != schedule_facts(tuned):
        why = "the scheduler (train.prediction_type or train.zero_terminal_snr)"
    elif base.extras != ExtraInputs.from_settings(recipe.train):
        why = "the inputs (train.inpainting or train.aesthetic_score)"
    else:
        return
    for rule in map(parse_rule, recipe.publish.gate):
        if rule.metric.startswith(HOLDOUT_LOSS) and rule.model == "base":
            raise Refused(
                f"publish.gate: {rule.text!r} compares incomparable losses, since {why} "
                "of the tuned model differ from the base's: remove the rule"
            )


def _check_schedulers(recipe: Recipe, base: Base) -> None:
    """Raise Refused for a scheduler that cannot draw the base or the tuned model."""
    drawn = recipe.evaluate
    for config in (base.scheduler, scheduler_config(base.scheduler, recipe.train)):
        registry.check_scheduler(recipe.runtime, config, drawn.scheduler, drawn.num_inference_steps)


def check_measuring_models(recipe: Recipe, stages: Sequence[StageName]) -> MeasuringModels:
    """Check the models that measure pictures, and find their local copies."""
    inception = None
    named = recipe.evaluate.inception
    folders = _check_measuring_folders(recipe)
    if named is not None:
        with _naming("evaluate.inception"):
            inception = resolve_file(named)
        if "evaluate" in stages:
            check_inception(inception, named)
    return MeasuringModels(*folders, inception)


def _check_measuring_folders(recipe: Recipe) -> tuple[Path, Path | None, dict[str, Path]]:
    """The folders of the CLIP model, of the image encoder and of the judges, checked."""
    settings = recipe.evaluate
    clip = _resolved("evaluate.clip", settings.clip)
    encoder = None
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
    return clip, encoder, judges


def check_local_models(recipe: Recipe) -> None:
    """As the checks above, of the models that need not be fetched first; others must exist."""
    here = {setting: _is_here(setting, *place) for setting, place in _models_of(recipe).items()}
    if all(found for setting, found in here.items() if setting.startswith("model.")):
        check_models(recipe)
    if all(found for setting, found in here.items() if setting.startswith("evaluate.")):
        _check_measuring_folders(recipe)
    if (inception := recipe.evaluate.inception) is not None and "://" not in inception:
        with _naming("evaluate.inception"):
            resolve_file(inception)


def _models_of(recipe: Recipe) -> dict[str, tuple[str, str | None]]:
    """Setting -> folder, hub id or URL of a model, and its revision."""
    model = recipe.model
    measured = recipe.evaluate
    judges = {f"evaluate.judges.{n}": path for n, path in measured.preference_models.items()}
    found = {
        "model.vae": model.vae,
        "evaluate.clip": measured.clip,
        "evaluate.image_encoder": measured.image_encoder,
        **judges,
    }
    others = {setting: (path, None) for setting, path in found.items() if path is not None}
    return {"model.path": (model.path, model.revision), **others}


def _is_here(setting: str, path: str, revision: str | None) -> bool:
    """Whether a model is a local folder. Raises Refused if neither it nor the hub has it."""
    with _naming(setting):
        if local_model(path) is not None:
            return True
        if "://" not in path:
            check_on_hub(path, revision=revision)
    return False


def _resolved(setting: str, path: str, revision: str | None = None) -> Path:
    """A model's local folder. Raises Refused, with the setting's name."""
    with _naming(setting):
        return resolve_model(path, revision=revision)


@contextmanager
def _naming(setting: str) -> Iterator[None]:
    """Put the setting's name before the message of a Refused or Away."""
    try:
        yield
    except (Refused, Away) as error:
        raise type(error)(f"{setting}: {error}") from None


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
    """Check a recipe's places, models, settings and, for the stages up to `until`, devices.

    Devices of stages with a work pool are checked there.

    Args:
        only: the single stage that this run builds; default: all up to `until`.

    Raises:
        Refused: the recipe cannot run here.
        Away: a place or a model does not answer now.
        Refused: the champion is damaged.
    """
    if force is not None and not force.strip():
        raise Refused("force: give a reason: the model card and the history name it")
    recipe = _used(recipe)
    check_gate_and_prompts(recipe)
    store = writable_store(recipe)
    built = STAGES[: 1 + STAGES.index(until)] if only is None else (only,)
    if publish.STAGE in built:  # which a damaged champion would fail after all other stages
        publish.registry_of(recipe).champion()
        for line in warnings_of_few_prompts(recipe):
            log.warning("%s", line)
    stages = _stages_here(recipe, built)
    _check_runtime(recipe, stages)
    if "train" in stages:
        if recipe.tpu is not None:
            tpu.check(recipe.tpu, recipe.store, recipe.train)
        _check_monitoring(recipe)
        warn_of_warmup(recipe.train)
    if "download" in built:  # a sent stage may be on a pool that does not reach the source
        download.check(recipe)
    _check_workers(recipe, stages)
    base = check_models(recipe)
    if "train" in stages:
        train.warn_of_kohya(recipe.train, base)
        _check_memory(recipe, base, stages)
    _check_license(recipe, base.folder)
    run_id = run_id or str(uuid.uuid4())
    return Run(
        *(recipe, store, base, check_measuring_models(recipe, stages)),
        id=run_id,
        retry_run=run_id if retry_failed else None,
        force=force,
        stages=built,
    )


def check_before_server(recipe: Recipe, until: StageName = "publish") -> None:
    """What `prepare` checks of a recipe, without what must be fetched first.

    Raises:
        Refused: the recipe cannot run here.
        Away: a place or a model does not answer now.
    """
    recipe = with_defaults_without_effect(recipe)  # `prepare` tells of them
    stages = stages_without_pool(recipe, STAGES[: 1 + STAGES.index(until)])
    check_gate_and_prompts(recipe)
    writable_store(recipe)
    _check_runtime(recipe, stages)
    if "train" in stages:
        _check_monitoring(recipe)
    if "download" in stages and not _is_remote(recipe.source):
        download.check(recipe)
    check_local_models(recipe)


def _used(recipe: Recipe) -> Recipe:
    """The recipe without the values that have no effect, of which the log tells."""
    for line in warnings_without_effect(recipe):
        log.warning("%s", line)
    return with_defaults_without_effect(recipe)


def check_gate_and_prompts(recipe: Recipe) -> None:
    """Check the gate's rules, the prompts of all sets, and the key of the signature.

    Raises:
        Refused: one of them is unusable.
    """
    check_rules(recipe.publish.gate, metric_names(recipe), recipe.evaluate.bootstrap)
    evaluate.check(recipe)
    if recipe.publish.signing_key is not None:
        check_key(recipe.publish.signing_key)


def writable_store(recipe: Recipe) -> Store:
    """The store; it and the registry can be written. Raises Refused for one that cannot."""
    store = Store(recipe.store)
    places = {"store": store}
    other = recipe.publish.registry
    if other is not None:
        places["publish.registry"] = Store(other)
    for setting, place in places.items():
        try:
            place.check_writable()
        except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
            why = f"no folder can be made at {place.url} ({error.strerror}): choose another"
            raise Refused(f"{setting}: {why}") from None
        except Exception as error:
            converted = storage_error(place, error)
            if converted is error and not isinstance(error, OSError):
                raise
            kind = Away if isinstance(converted, Away) else Refused
            raise kind(f"{setting}: {converted}") from error
    return store


def _stages_here(recipe: Recipe, stages: Sequence[StageName]) -> Sequence[StageName]:
    """The stages that are not sent to a work pool. Raises Refused for one that cannot be."""
    check_places(recipe, stages)
    check_deployments(recipe.place, stages)
    return stages_without_pool(recipe, stages)


def stages_without_pool(recipe: Recipe, stages: Sequence[StageName] = STAGES) -> list[StageName]:
    """The stages that are built on this machine."""
    return [stage for stage in stages if stage not in recipe.place.pools()]


def _check_runtime(recipe: Recipe, stages: Sequence[StageName]) -> None:
    if not {"encode", "train", "evaluate"} & set(stages):
        return
    registry.check_installed(recipe.runtime)
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
    registry.check_devices(recipe.runtime, asked)
    if "train" in stages:
        if recipe.tpu is not None:  # tasks.tpu.check compares it with the chips of the slice
            settings = settings.model_copy(update={"fsdp": 1})
        registry.check_settings(recipe.runtime, settings)


def devices_here(recipe: Recipe, stages: Sequence[StageName]) -> dict[str, str]:
    """Setting -> device of the stages that compute on this machine."""
    computing = [stage for stage in stages if stage in ("encode", "train", "evaluate")]
    if "encode" in computing and workers_of(beam_options(recipe, "encode")) is Workers.REMOTE:
        computing.remove("encode")  # its device is on machines that cannot be asked
    return {f"{stage}.device": getattr(recipe, stage).device for stage in computing}


def _check_monitoring(recipe: Recipe) -> None:
    """Raise Refused for a tracker or a held-out loss that cannot work."""
    check_wandb(recipe.train.wandb)
    if recipe.train.holdout_loss.every_n_steps and not recipe.encode.holdout:
        raise Refused("train.holdout_loss needs held-out samples: raise encode.holdout")
    rule = recipe.train.best_checkpoint
    known = [HOLDOUT_LOSS, *sample_metrics(recipe.evaluate.judges)]
    if rule is not None and rule.metric not in known:
        raise Refused(
            f"train.best_checkpoint.metric: {rule.metric} is not scored while training; it scores "
            f"{', '.join(known)}"
        )


def _is_remote(source: Source) -> bool:
    path = getattr(source, "path", "")
    return "://" in path or (source.kind == "dataset" and is_hub_id(path))


def _check_workers(recipe: Recipe, stages: Sequence[StageName]) -> None:
    """Raise Refused for Beam options or workers that cannot work."""
    for options in filter(None, (beam_options(recipe, stage) for stage in BEAM_STAGES)):
        from tasks.beam.pipeline import check_options  # seconds to import

        check_options(options)
    check_workers(recipe, stages)


def _check_memory(recipe: Recipe, base: Base, stages: Sequence[StageName]) -> None:
    """Raise Refused if a run of runtime torch cannot fit this machine and its largest GPU."""
    if must_fit_one_gpu(recipe) and (found := usable_gpus()):
        # Where another machine evaluates, it may have more memory.
        host = host_memory() if "evaluate" in stages else None
        check_fits(recipe, base, max(gpu.memory for gpu in found), host)


def must_fit_one_gpu(recipe: Recipe) -> bool:
    """Whether training needs the memory of `memory_of` on one GPU, if there is one."""
    settings = recipe.train
    on_gpu = settings.device.partition(":")[0] in ("auto", "cuda")
    sharded = settings.fsdp != 1 and settings.processes > 1
    return recipe.runtime == "torch" and on_gpu and not sharded


def _check_license(recipe: Recipe, base: Path) -> None:
    if recipe.publish.require_license and shown_license(recipe.publish, base) == UNKNOWN_LICENSE:
        raise Refused(
            "publish.require_license: neither publish.license nor the base's card has a licence"
        )
    if (conflict := license_conflict(recipe.publish, base)) is not None:
        log.warning("%s", conflict)


def check_gate_rules(recipe: Recipe, latents: Latents) -> None:
    """Raise Refused for rules on metrics that these latents do not support."""
    count = latents.held_out
    share = f"encode.holdout {recipe.encode.holdout:g}"
    hint = f"{share} selected {count or 'none'} of these few pictures: raise it or remove the rule"
    known = metric_names(recipe, held_out=count)
    check_rules(recipe.publish.gate, known, recipe.evaluate.bootstrap, hint)
