"""The doors that a recipe passes before anything starts: settings, places, machine, models.

Each door is a list of checks. The machine comes before the models, which may be fetched for an
hour. Work pools, which Prefect's server knows, are checked in flows/checks.py.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from functools import partial

from artifacts.errors import classify
from artifacts.store import Store
from configs.errors import Away, Refused, UserError, naming
from configs.preflight import Check, Finding, fine, note
from configs.secrets import without_secrets
from configs.settings.data import Source
from configs.settings.recipe import (
    STAGES,
    Place,
    Recipe,
    RuntimeName,
    StageName,
    warnings_without_effect,
    with_defaults_without_effect,
)
from configs.settings.train import Train
from configs.settings.train_parts import HOLDOUT_LOSS
from runtimes import registry
from runtimes.detect_hardware import host_memory, usable_gpus
from runtimes.torch_models.gpu_specs import GIB
from runtimes.train.trackers import check_wandb
from tasks import download, tpu
from tasks.beam import workers
from tasks.evaluate import stage as evaluate
from tasks.evaluate.metrics import metric_names, sample_metrics
from tasks.open_models import Models
from tasks.plan.gpu import check_fits, memory_of
from tasks.publish import stage as publish
from tasks.publish.hub import check_key
from tasks.publish.promotion_gate import check_rules, warnings_of_few_prompts
from tasks.train import notes_of_warmup


class Doors:
    """The checks of a recipe, for the stages that a run builds.

    Args:
        asked: the recipe as it was given.
        built: stages of the run.
        fetch: whether models are downloaded; otherwise it is only checked that they are there.
        words: command line arguments that give the recipe, for the commands of remedies.
    """

    def __init__(
        self,
        asked: Recipe,
        built: Sequence[StageName] = STAGES,
        *,
        fetch: bool = True,
        words: Sequence[str] = (),
    ) -> None:
        self.asked = asked
        self.recipe = with_defaults_without_effect(asked)
        self.built = built
        self.here = stages_without_pool(self.recipe.place, built)
        self.opened = Models(self.recipe, self.here, fetch)
        self._words = words or (asked.name,)

    def settings(self) -> Iterator[Check]:
        """What the recipe says, and the files of prompts and keys that it names."""
        yield Check("settings", lambda: map(note, warnings_without_effect(self.asked)))
        yield Check("gate and prompts", self._gate_and_prompts)
        if "train" in self.here:
            yield Check("monitoring", partial(check_monitoring, self.recipe))
            yield Check("warm-up", partial(notes_of_warmup, self.recipe.train))

    def places(self) -> Iterator[Check]:
        """Store, registry, source, work pools and Beam's workers."""
        recipe = self.recipe
        yield Check("store", self._stores)
        yield Check("work pools", partial(workers.check_places, recipe, self.built))
        if "download" in self.built:  # a work pool that is sent to may not reach the source
            yield Check("source", self._source, remote=_is_remote(recipe.source))
        yield Check("workers", self._workers, remote=True)

    def machine(self) -> Iterator[Check]:
        """Runtime, devices and the settings that they support."""
        if {"encode", "train", "evaluate"} & set(self.here):
            yield Check("runtime", self._runtime)

    def models(self) -> Iterator[Check]:
        """The models, opened at most once, and whether they fit the machine."""
        yield from self.opened.checks()
        if "train" in self.here:
            yield Check("memory", self._memory)

    def _gate_and_prompts(self) -> Iterator[Finding]:
        """The gate's rules, the prompts of all sets, and the key of the signature."""
        recipe = self.recipe
        gate = recipe.publish.gate
        check_rules(gate, metric_names(recipe), recipe.evaluate.bootstrap)
        evaluate.check(recipe)
        if recipe.publish.signing_key is not None:
            check_key(recipe.publish.signing_key)
        yield fine("gate and prompts")
        if publish.STAGE in self.built:
            yield from map(note, warnings_of_few_prompts(gate, recipe.evaluate))

    def _stores(self) -> Iterator[Finding]:
        recipe = self.recipe
        yield from check_writable("store", recipe.store)
        if recipe.publish.registry is not None:
            yield from check_writable("publish.registry", recipe.publish.registry)
        if publish.STAGE in self.built:  # a damaged champion would fail it after all other stages
            publish.registry_of(recipe).champion()

    def _source(self) -> Iterator[Finding]:
        download.check(self.recipe)
        where = getattr(self.recipe.source, "path", None) or self.recipe.source.kind
        yield fine(f"source: {without_secrets(str(where))} opens")

    def _workers(self) -> None:
        each = [workers.beam_options(self.recipe, stage) for stage in workers.BEAM_STAGES]
        for options in filter(None, each):
            from tasks.beam.pipeline import make_pipeline  # seconds to import

            make_pipeline(options)
        workers.check_workers(self.recipe, self.here)

    def _runtime(self) -> None:
        recipe = self.recipe
        registry.check_installed(recipe.runtime)
        devices = devices_here(recipe, self.here)
        if set(devices.values()) <= {"auto", "cpu"} and not _may_refuse(
            recipe.runtime, recipe.train
        ):
            return  # always available; a probe would import the runtime, which takes seconds
        registry.check_devices(recipe.runtime, devices)
        if "train" not in self.here:
            return
        settings = recipe.train
        if recipe.tpu is not None:
            tpu.check(recipe.tpu, recipe.store, settings)
            settings = settings.model_copy(update={"fsdp": 1})  # tpu.check compares it
        registry.check_settings(recipe.runtime, settings)

    def _memory(self) -> Iterator[Finding]:
        """Whether training fits the largest GPU of this machine, if it trains on a GPU."""
        recipe = self.recipe
        if not _must_fit_one_gpu(recipe.runtime, recipe.train) or not (gpus := usable_gpus()):
            return
        gpu = max(gpus, key=lambda gpu: gpu.memory)
        if self.opened.fetch:
            # Where another machine evaluates, it may have more memory.
            host = host_memory() if "evaluate" in self.here else None
            check_fits(recipe, self.opened.base, gpu.memory, host)
            return
        plan = memory_of(recipe)
        words = without_secrets(shlex.join(self._words))
        command = f"kiln plan {words} --gpu {gpu.memory / GIB:.0f}GB"
        if plan is None:
            yield note("the recipe's memory is not planned yet", command)
        elif plan.fits(gpu.memory):
            yield fine(f"memory: {plan.largest / GIB:.1f} GiB fit {gpu.name}")
        else:
            raise Refused(
                f"memory: {plan.largest / GIB:.1f} GiB are needed, {gpu.name} has "
                f"{gpu.memory / GIB:.1f} GiB",
                remedy=command,
            )


def check_writable(setting: str, url: str) -> Iterator[Finding]:
    """Create, replace and delete an object, as a run does. Raises Refused or Away."""
    remedy = f"grant the permission, or set `{setting}` to another folder or URL"
    with naming(setting, remedy):
        store = Store(url)
    is_new = store.is_local and not os.path.isdir(store.root)
    try:
        store.check_writable()
    except Exception as error:
        meaning = classify(error, store.url)
        if isinstance(error, FileExistsError | FileNotFoundError | NotADirectoryError):
            meaning = Refused(f"no folder can be made at {store.url} ({error.strerror})")
        elif meaning is error and not isinstance(error, OSError):
            raise
        elif not isinstance(meaning, UserError):
            meaning = Refused(meaning)
        kind = Away if isinstance(meaning, Away) else Refused
        raise kind(meaning.what, setting=setting, remedy=meaning.remedy or remedy) from error
    finally:
        if is_new and os.path.isdir(store.root) and not os.listdir(store.root):
            os.rmdir(store.root)
    yield fine(f"{setting}: {store.url} can be written")


def stages_without_pool(place: Place, stages: Sequence[StageName] = STAGES) -> list[StageName]:
    """The stages that are built on this machine."""
    return [stage for stage in stages if stage not in place.pools()]


def devices_here(recipe: Recipe, stages: Sequence[StageName]) -> dict[str, str]:
    """Setting -> device of the stages that compute on this machine."""
    computing = [stage for stage in stages if stage in ("encode", "train", "evaluate")]
    if (
        "encode" in computing
        and workers.workers_of(workers.beam_options(recipe, "encode")) is workers.Workers.REMOTE
    ):
        computing.remove("encode")  # its device is on machines that cannot be asked
    return {f"{stage}.device": getattr(recipe, stage).device for stage in computing}


def _may_refuse(runtime: RuntimeName, settings: Train) -> bool:
    """Whether the runtime refuses some values of the settings that differ from the defaults."""
    return (
        runtime != "torch"
        or (settings.processes > 1 and settings.device != "cpu")
        or settings.fsdp not in (1, "all")
        or settings.optimizer == "adamw_8bit"
        or settings.compile not in ("auto", "none")
        or settings.attention != "auto"
        or settings.cuda_graphs
        or settings.allow_tf32
    )


def check_monitoring(recipe: Recipe) -> None:
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
    return "://" in path or (source.kind == "dataset" and workers.is_hub_id(path))


def _must_fit_one_gpu(runtime: RuntimeName, settings: Train) -> bool:
    """Whether training needs the memory of `memory_of` on one GPU, if the machine has a GPU."""
    on_gpu = settings.device.partition(":")[0] in ("auto", "cuda")
    sharded = settings.fsdp != 1 and settings.processes > 1
    return runtime == "torch" and on_gpu and not sharded
