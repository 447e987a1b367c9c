"""Checks of a recipe before the first stage, and before training."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from pathlib import Path

from artifacts.latent_shards import Latents
from artifacts.store import Store
from configs.load_recipe import RecipeError
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
from flows.check_models import check_local_models, check_measuring_models, check_models
from flows.run import Run
from flows.send_stage import check_deployments
from runtimes import registry
from runtimes.hosts.host import host_memory, usable_gpus
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
from tasks.evaluate import stage as evaluate
from tasks.evaluate.metrics import metric_names, sample_metrics
from tasks.plan.gpu import check_fits
from tasks.publish import stage as publish
from tasks.publish.hub import check_key
from tasks.publish.model_card import UNKNOWN_LICENSE, license_conflict, shown_license
from tasks.publish.promotion_gate import check_rules, warnings_of_few_prompts
from tasks.stage import storage_error
from tasks.train import warn_of_warmup

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
        RecipeError, GateError, ModelNotFound, SourceError, WrongInput: the recipe cannot run here.
        RegistryError: the champion is damaged.
    """
    if force is not None and not force.strip():
        raise RecipeError("force: give a reason: the model card and the history name it")
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
    model, vae = check_models(recipe)
    if "train" in stages:
        train.warn_of_kohya(recipe, model)
        _check_memory(recipe, model, vae, stages)
    _check_license(recipe, model)
    run_id = run_id or str(uuid.uuid4())
    return Run(
        *(recipe, store, model, vae, check_measuring_models(recipe, stages)),
        id=run_id,
        retry_run=run_id if retry_failed else None,
        force=force,
        stages=built,
    )


def check_before_server(recipe: Recipe, until: StageName = "publish") -> None:
    """What `prepare` checks of a recipe, without what must be fetched first.

    Raises:
        RecipeError, GateError, ModelNotFound, SourceError, WrongInput: the recipe cannot run here.
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
        GateError, WrongInput, SignatureError: one of them is unusable.
    """
    check_rules(recipe.publish.gate, metric_names(recipe), recipe.evaluate.bootstrap)
    evaluate.check(recipe)
    if recipe.publish.signing_key is not None:
        check_key(recipe.publish.signing_key)


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


def _stages_here(recipe: Recipe, stages: Sequence[StageName]) -> Sequence[StageName]:
    """The stages that are not sent to a work pool. Raises RecipeError for one that cannot be."""
    check_places(recipe, stages)
    check_deployments(recipe, stages)
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
        if recipe.tpu is not None:  # launch.check compares it with the chips of the slice
            settings = settings.model_copy(update={"fsdp": 1})
        registry.check_settings(recipe.runtime, settings)


def devices_here(recipe: Recipe, stages: Sequence[StageName]) -> dict[str, str]:
    """Setting -> device of the stages that compute on this machine."""
    computing = [stage for stage in stages if stage in ("encode", "train", "evaluate")]
    if "encode" in computing and workers_of(beam_options(recipe, "encode")) is Workers.REMOTE:
        computing.remove("encode")  # its device is on machines that cannot be asked
    return {f"{stage}.device": getattr(recipe, stage).device for stage in computing}


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


def _is_remote(source: Source) -> bool:
    path = getattr(source, "path", "")
    return "://" in path or (source.kind == "dataset" and is_hub_id(path))


def _check_workers(recipe: Recipe, stages: Sequence[StageName]) -> None:
    """Raise BeamOptionsError or RecipeError for Beam options or workers that cannot work."""
    for options in filter(None, (beam_options(recipe, stage) for stage in BEAM_STAGES)):
        from tasks.beam.pipeline import check_options  # seconds to import

        check_options(options)
    check_workers(recipe, stages)


def _check_memory(
    recipe: Recipe, model: Path, vae: Path | None, stages: Sequence[StageName]
) -> None:
    """Raise WrongInput if a run of runtime torch cannot fit this machine and its largest GPU."""
    if must_fit_one_gpu(recipe) and (found := usable_gpus()):
        # Where another machine evaluates, it may have more memory.
        host = host_memory() if "evaluate" in stages else None
        check_fits(recipe, model, vae, max(gpu.memory for gpu in found), host)


def must_fit_one_gpu(recipe: Recipe) -> bool:
    """Whether training needs the memory of `memory_of` on one GPU, if there is one."""
    settings = recipe.train
    on_gpu = settings.device.partition(":")[0] in ("auto", "cuda")
    sharded = settings.fsdp != 1 and settings.processes > 1
    return recipe.runtime == "torch" and on_gpu and not sharded


def _check_license(recipe: Recipe, base: Path) -> None:
    if recipe.publish.require_license and shown_license(recipe, base) == UNKNOWN_LICENSE:
        raise RecipeError(
            "publish.require_license: neither publish.license nor the base's card has a licence"
        )
    if (conflict := license_conflict(recipe, base)) is not None:
        log.warning("%s", conflict)


def check_gate_rules(recipe: Recipe, latents: Latents) -> None:
    """Raise GateError for rules on metrics that these latents do not support."""
    count = latents.held_out
    share = f"encode.holdout {recipe.encode.holdout:g}"
    hint = f"{share} selected {count or 'none'} of these few pictures: raise it or remove the rule"
    known = metric_names(recipe, held_out=count)
    check_rules(recipe.publish.gate, known, recipe.evaluate.bootstrap, hint)
