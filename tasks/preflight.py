"""The doors that a recipe passes before anything starts: settings, places, machine, models.

Each door is a list of checks. The machine comes before the models, which may be fetched for an
hour, and are opened at most once. Work pools, which Prefect's server knows, are checked in
flows/run.py.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from artifacts import models
from artifacts.errors import classify
from artifacts.latent_shards import LatentScale
from artifacts.store import Store
from configs.checks import Check, Finding, fine, note
from configs.errors import Away, Refused, UserError, naming, naming_source
from configs.secrets import without_secrets
from configs.settings.caption import Caption
from configs.settings.data import Source, references_of
from configs.settings.evaluate import Evaluate, Sibling
from configs.settings.recipe import (
    STAGES,
    Model,
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
from runtimes.families.inpainting_aesthetics import ExtraInputs
from runtimes.objective.noise_schedule import ResolutionShift, schedule_facts, scheduler_config
from runtimes.objective.training_objective import Objective
from runtimes.pipeline_folder.folder import Base, replacement_config
from runtimes.pipeline_folder.single_file import is_single_file, open_checkpoint, resolve_base
from runtimes.pipeline_folder.weights import check_tokenizers, check_weights, stored_weight_files
from runtimes.torch_models.gpu_specs import GIB
from runtimes.train.trackers import check_wandb
from tasks import download, drawn_source, train
from tasks.beam import workers
from tasks.describe import describers
from tasks.download.references import check_number
from tasks.encode.crop_to_bucket import TransformSettings, bucket_sizes
from tasks.evaluate import stage as evaluate
from tasks.evaluate.features import check_clip, check_image_encoder
from tasks.evaluate.inception import check_inception, fidelity_folder
from tasks.evaluate.inputs import MeasuringModels
from tasks.evaluate.metrics import metric_names, sample_metrics
from tasks.hosts import choose
from tasks.plan.across_hosts import notes_of_groups
from tasks.plan.gpu import check_fits
from tasks.plan.shipped_plans import memory_of
from tasks.publish import stage as publish
from tasks.publish.assemble import model_parts
from tasks.publish.gate_power import newest_estimates, undecidable
from tasks.publish.hub import signer
from tasks.publish.model_card import UNKNOWN_LICENSE, license_conflict, shown_license
from tasks.publish.promotion_gate import check_prompts, check_rules, parse_rule
from tasks.select.stage import check_names
from tasks.train import notes_of_warmup

#: Stages that compute on a device.
COMPUTING = {"describe", "caption", "encode", "train", "evaluate"}


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
        #: Name -> recipe of each source; without a mixture, "" -> the recipe itself.
        self.parts = {n: with_defaults_without_effect(p) for n, p in asked.by_source.items()}
        self.built = [stage for stage in built if stage in asked.stages]
        self.here = stages_without_pool(self.recipe.place, self.built)
        self.opened = Models(self.recipe, self.here, fetch)
        self._words = words or (asked.name,)

    def settings(self) -> Iterator[Check]:
        """What the recipe says, and the files of prompts and keys that it names."""
        yield Check("settings", lambda: map(note, warnings_without_effect(self.asked)))
        yield Check("gate and prompts", self._gate_and_prompts)
        if "train" in self.here:
            yield Check("monitoring", self._monitoring)
            yield Check("warm-up", partial(notes_of_warmup, self.recipe.train))
        if "train" in self.here and self.recipe.runtime == "torch":
            yield Check("shard groups", partial(notes_of_groups, self.recipe.train))

    def places(self) -> Iterator[Check]:
        """Store, registry, source, work pools and Beam's workers."""
        recipe = self.recipe
        yield Check("store", self._stores)
        for name, part in self.parts.items():
            yield Check("work pools", partial(workers.check_places, part, self.built))
            if "download" in self.built:  # a work pool that is sent to may not reach the source
                yield Check("source", partial(_source, name, part), remote=_is_remote(part.source))
        yield Check("workers", self._workers, remote=True)
        yield Check("cluster", partial(choose.check, recipe, self.here), remote=True)
        if publish.STAGE in self.built:
            yield self.gate_power(Store(recipe.store))

    def gate_power(self, store: Store | None) -> Check:
        """Whether the gate's rules can be decided by the recipe's prompts and pictures.

        Args:
            store: where evaluations of the base may be; None: it is not asked.
        """

        def find() -> Iterator[Finding]:
            evaluated = {} if store is None else newest_estimates(self.recipe, store)
            with suppress(Refused, Away):  # of prompt files, which `evaluate.check` tells
                yield from map(note, undecidable(self.recipe, evaluated))

        return Check("power of the gate", find, remote=store is not None and not store.is_local)

    def machine(self) -> Iterator[Check]:
        """Runtime, devices and the settings that they support."""
        if COMPUTING & set(self.here):
            yield Check("runtime", self._runtime)

    def models(self) -> Iterator[Check]:
        """The models, opened at most once, and whether they fit the machine."""
        yield from self.opened.checks()
        if "train" in self.here and not self.recipe.trains_elsewhere:
            yield Check("memory", self._memory)

    def _gate_and_prompts(self) -> Iterator[Finding]:
        """The gate's rules, the prompts of all sets, and the key of the signature."""
        recipe = self.recipe
        gate = recipe.publish.gate
        check_rules(gate, metric_names(recipe), recipe.evaluate.bootstrap)
        evaluate.check(recipe)
        if recipe.publish.signing_key is not None:
            signer(recipe.publish.signing_key)
        yield fine("gate and prompts")
        if publish.STAGE in self.built:
            yield from map(note, check_prompts(gate, recipe.evaluate))

    def _monitoring(self) -> None:
        """Raise Refused for a tracker or a held-out loss that cannot work."""
        recipe = self.recipe
        check_wandb(recipe.train.wandb)
        held_out = any(part.encode.holdout for part in self.parts.values())
        if recipe.train.holdout_loss.every_n_steps and not held_out:
            raise Refused("train.holdout_loss needs held-out samples: raise encode.holdout")
        rule = recipe.train.best_checkpoint
        known = [HOLDOUT_LOSS, *sample_metrics(recipe.evaluate.judges)]
        if rule is not None and rule.metric not in known:
            raise Refused(
                f"train.best_checkpoint.metric: {rule.metric} is not scored while training; it "
                f"scores {', '.join(known)}"
            )
        if rule is not None and rule.by_samples and not recipe.evaluate.has_samples:
            raise Refused(
                f"{rule.metric} is of sample pictures, and all prompts have references or are "
                "held_out: add a prompt without to evaluate.prompts, or set it to holdout_loss",
                setting="train.best_checkpoint.metric",
            )

    def _stores(self) -> Iterator[Finding]:
        recipe = self.recipe
        yield from check_writable("store", recipe.store)
        if recipe.publish.registry is not None:
            yield from check_writable("publish.registry", recipe.publish.registry)
        if publish.STAGE in self.built:  # a damaged champion would fail it after all other stages
            publish.registry_of(recipe).champion()

    def _workers(self) -> None:
        for part in self.parts.values():
            for stage in [name for name in workers.BEAM_STAGES if name in part.stages]:
                if options := workers.beam_options(part, stage):
                    from tasks.beam.pipeline import make_pipeline  # seconds to import

                    make_pipeline(options)
            workers.check_workers(part, self.here)

    def _runtime(self) -> None:
        recipe = self.recipe
        registry.check_installed(recipe.runtime)
        on_cluster = recipe.trains_elsewhere and recipe.tpu is None
        if "train" in self.here and on_cluster:
            registry.check_elsewhere(recipe.runtime, recipe.train)
        devices = devices_here(recipe, self.here)
        is_plain = set(devices.values()) <= {"auto", "cpu"}
        if is_plain and not _may_refuse(recipe.runtime, recipe.train):
            return  # always available; a probe would import the runtime, which takes seconds
        registry.check_devices(recipe.runtime, devices)
        if "train" not in self.here or on_cluster:
            return
        settings = recipe.train
        if recipe.tpu is not None:  # whose chips the check of the cluster counts
            settings = settings.model_copy(update={"fsdp": 1, "device": "auto"})
        registry.check_settings(recipe.runtime, settings)

    def _memory(self) -> Iterator[Finding]:
        """Whether training fits the largest GPU of this machine, if it trains on a GPU."""
        recipe = self.recipe
        on_gpu = recipe.train.device.partition(":")[0] in ("auto", "cuda")
        sharded = recipe.train.fsdp != 1 and recipe.train.world_size > 1
        must_fit_one = recipe.runtime == "torch" and on_gpu and not sharded
        if not must_fit_one or not (gpus := usable_gpus()):
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
        elif recipe.train.memory == "auto":
            yield note(f"train.memory: auto will choose settings that fit {gpu.name}", command)
        else:
            raise Refused(
                f"memory: {plan.largest / GIB:.1f} GiB are needed, {gpu.name} has "
                f"{gpu.memory / GIB:.1f} GiB",
                remedy=command,
            )


def _source(name: str, recipe: Recipe) -> Iterator[Finding]:
    with naming_source(name):
        download.check(recipe)
    where = getattr(recipe.source, "path", None) or recipe.source.kind
    yield fine(f"{f'source {name}'.rstrip()}: {without_secrets(str(where))} opens")


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


def stages_without_pool(place: Place, stages: Sequence[StageName]) -> list[StageName]:
    """The stages that are built on this machine."""
    return [stage for stage in stages if stage not in place.pools()]


def devices_here(recipe: Recipe, stages: Sequence[StageName]) -> dict[str, str]:
    """Setting -> device of the stages that compute on this machine, not on hosts of a cluster."""
    devices = dict[str, str]()
    for part in recipe.by_source.values():
        on_hosts = {stage for stage in stages if part.hosts_of(stage) is not None}
        computing = COMPUTING.intersection(stages, part.stages) - on_hosts
        for stage in workers.BEAM_STAGES:
            kind = stage in computing and workers.workers_of(workers.beam_options(part, stage))
            if kind is workers.Workers.REMOTE:  # whose devices cannot be asked
                computing.discard(stage)
        devices |= {f"{stage}.device": getattr(part, stage).device for stage in computing}
    return devices


def _may_refuse(runtime: RuntimeName, settings: Train) -> bool:
    """Whether the runtime refuses some values of the settings that differ from the defaults."""
    return (
        runtime != "torch"
        or (settings.processes > 1 and settings.device != "cpu")
        or settings.fsdp not in (1, "all")
        or settings.optimizer.endswith("_8bit")
        or settings.compile not in ("auto", "none")
        or settings.attention != "auto"
        or settings.cuda_graphs
        or settings.allow_tf32
    )


def _is_remote(source: Source) -> bool:
    path = getattr(source, "path", "")
    return "://" in path or (source.kind == "dataset" and workers.is_hub_id(path))


@dataclass(frozen=True)
class Models:
    """The base, its VAE, and the models that measure pictures.

    Args:
        stages: those that this machine builds.
        fetch: whether models of a hub or a store are downloaded; otherwise they must be there to
            be fetched, and are not opened.
    """

    recipe: Recipe
    stages: Collection[StageName]
    fetch: bool

    def checks(self) -> Iterator[Check]:
        """The checks of the door."""
        for setting, (path, _) in self._places.items():
            yield Check(setting, partial(self._available, setting), remote="://" in path)
        yield Check("base", self._fits_settings)
        if (named := self.recipe.evaluate.inception) is not None:
            find = partial(self._inception, named)
            yield Check("evaluate.inception", find, remote="://" in named)
        yield Check("measuring models", self._measures)
        if self.recipe.evaluate.model is not None:
            yield Check("evaluate.model", self._sibling_fits)
        for part in self.recipe.by_source.values():
            describe = part.describe
            if describe is not None and "describe" in self.stages:
                max_pixels = part.download.max_pixels
                yield from describers.checks(describe, max_pixels, fetch=self.fetch)
            is_known = self.fetch or describe is None or describers.are_local(describe)
            if part.select is not None and "select" in self.stages and is_known:
                yield Check("select", partial(check_names, part))
            if part.caption is not None and "caption" in self.stages:
                yield Check("captioner", partial(self._captions, part.caption))

    @cached_property
    def base(self) -> Base:
        """The base, opened with the recipe's VAE. Raises Refused or Away."""
        vae = self._folder("model.vae") if "model.vae" in self._places else None
        model = self._folder("model.path")
        with naming("model.path" if vae is None else "model.path or model.vae"):
            base = Base.open(model, vae, **self.recipe.encode.reading)
            _ = base.encoders
        return base

    @cached_property
    def measuring(self) -> MeasuringModels:
        """Local copies of the models that measure. Raises Refused or Away."""
        inception = self.recipe.evaluate.inception
        encoder = "evaluate.image_encoder"
        with naming("evaluate.inception"):
            weights = None if inception is None else models.resolve_file(inception)
        return MeasuringModels(
            self._folder("evaluate.clip"),
            self._folder(encoder) if encoder in self._places else None,
            {name: self._folder(_judge(name)) for name in self.recipe.evaluate.preference_models},
            weights,
            self._sibling,
        )

    @property
    def _bases(self) -> dict[str, Model | Sibling]:
        """Setting -> base, which may be a checkpoint file."""
        sibling = self.recipe.evaluate.model
        return {"model.path": self.recipe.model} | ({"evaluate.model": sibling} if sibling else {})

    @cached_property
    def _sibling(self) -> Base | None:
        """The base of `evaluate.model`, opened. Raises Refused or Away."""
        if self.recipe.evaluate.model is None:
            return None
        with naming("evaluate.model"):
            folder = self._folder("evaluate.model")
            return Base.open(folder, **self.recipe.encode.reading)

    def can_open(self, section: str) -> bool:
        """Whether the models of a section, `model` or `evaluate`, may be opened."""
        named = [place for name, place in self._places.items() if name.startswith(f"{section}.")]
        if any(is_single_file(path) for path, _ in named):
            return self.fetch  # to convert a file takes minutes
        try:
            return self.fetch or all(models.local_model(path) is not None for path, _ in named)
        except Refused:  # of `_available`
            return False

    @cached_property
    def _places(self) -> Mapping[str, tuple[str, str | None]]:
        """Setting -> folder, hub id or URL of a model, and its revision."""
        model = self.recipe.model
        measured = self.recipe.evaluate
        judges = {_judge(name): path for name, path in measured.preference_models.items()}
        paths = {
            "model.vae": model.vae,
            "model.components": model.components,
            "evaluate.model": measured.model.path if measured.model else None,
            "evaluate.model.components": measured.model.components if measured.model else None,
            "evaluate.clip": measured.clip,
            "evaluate.image_encoder": measured.image_encoder,
            **judges,
        }
        others: dict[str, tuple[str, str | None]] = {}
        others |= {setting: (path, None) for setting, path in paths.items() if path is not None}
        for captions in (part.caption for part in self.recipe.by_source.values()):
            if captions is not None and captions.endpoint is None and "caption" in self.stages:
                others["caption.model"] = captions.model, captions.revision
        return {"model.path": (model.path, model.revision), **others}

    def _folder(self, setting: str) -> Path:
        path, revision = self._places[setting]
        with naming(setting):
            if setting in self._bases:
                return resolve_base(self._bases[setting])
            return models.resolve_model(path, revision=revision)

    def _available(self, setting: str) -> Iterator[Finding]:
        path, revision = self._places[setting]
        if not self.fetch:
            file = ", .safetensors file" if setting in self._bases else ""
            with naming(setting, f"set {setting} to a folder{file}, URL or hub id"):
                if setting in self._bases and is_single_file(path):
                    where = models.check_file_available(path)
                    if "://" not in path:
                        open_checkpoint(self._bases[setting])
                else:
                    where = models.check_model_available(path, revision=revision)
            yield fine(f"{setting}: {without_secrets(path)} ({where})")

    def _fits_settings(self) -> Iterator[Finding]:
        if not self.can_open("model"):
            return
        recipe = self.recipe
        drawn = recipe.evaluate
        base = self.base
        for device in (recipe.train.device, drawn.device):
            registry.check_family(recipe.runtime, base.family.name, device)
        transforms = map(TransformSettings.of, recipe.by_source.values())
        sizes = (bucket_sizes(some, base.encoders["size_step"]) for some in transforms)
        largest = max(max(map(max, some)) for some in sizes)
        _check_position_embeddings(recipe.train, drawn, base, largest)
        evaluate.check_drawn_size(drawn, base)
        evaluate.check_references(drawn, base)
        _check_weights(base)
        check_tokenizers(base)
        _check_references(recipe, base)
        _check_objective(recipe, base)
        sampler = (drawn.scheduler, drawn.num_inference_steps)
        for config in (base.scheduler, scheduler_config(base.scheduler, recipe.train)):
            registry.check_scheduler(recipe.runtime, config, *sampler)
        train.check(recipe, base)
        for part in recipe.by_source.values():
            drawn_source.check(part, base)
        if "train" in self.stages:
            yield from train.notes_of_kohya(recipe.train, base)
            yield from train.notes_of_distillation(recipe.train, base)
        folder = base.folder
        unknown = shown_license(recipe.publish, folder) == UNKNOWN_LICENSE
        if recipe.publish.require_license and unknown:
            raise Refused(
                "publish.require_license: neither publish.license nor the base's card has a licence"
            )
        if (conflict := license_conflict(recipe.publish, folder)) is not None:
            yield note(conflict)

    def _sibling_fits(self) -> None:
        if not (self.can_open("model") and self.can_open("evaluate")):
            return
        assert self._sibling is not None
        with naming("evaluate.model"):
            _check_weights(self._sibling)
            evaluate.check_sibling(self.recipe, self.base, self._sibling)

    def _inception(self, named: str) -> Iterator[Finding]:
        with naming("evaluate.inception"):
            where = models.check_file_available(named)
        yield fine(f"evaluate.inception: {without_secrets(named)} ({where})")
        if "evaluate" in self.stages:
            fidelity_folder()

    def _measures(self) -> None:
        if not self.can_open("evaluate"):
            return
        check_clip(self._folder("evaluate.clip"))
        if "evaluate.image_encoder" in self._places:
            check_image_encoder(self._folder("evaluate.image_encoder"))
        for name in self.recipe.evaluate.preference_models:
            check_clip(self._folder(_judge(name)), _judge(name))
        named = self.recipe.evaluate.inception
        if named is not None and self.fetch and "evaluate" in self.stages:
            assert self.measuring.inception is not None
            check_inception(self.measuring.inception, named)

    def _captions(self, captions: Caption) -> Iterator[Finding]:
        if captions.endpoint is not None:
            from tasks.caption.endpoint import check_endpoint, key_of  # with the download's client

            yield from check_endpoint(captions.endpoint, key_of(self.recipe.publish.name))
        elif self.can_open("caption"):
            from tasks.caption.vision_language import check_vision_language

            with naming("caption.model"):
                place = models.resolve_model(captions.model, revision=captions.revision)
            check_vision_language(place)


def _judge(name: str) -> str:
    """The setting of a judge's model."""
    return f"evaluate.judges.{name}"


def _check_position_embeddings(train: Train, evaluate: Evaluate, base: Base, largest: int) -> None:
    """Raise Refused for pictures whose sides exceed a denoiser's table of positions (SD3).

    Args:
        largest: the longest side of a bucket, in pixels.
    """
    instead = replacement_config(train)
    factor = base.encoders["size_step"]  # pixels per position
    trained = base.denoiser if instead is None else instead
    draws = max(evaluate.height or 0, evaluate.width or 0)
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


def _check_references(recipe: Recipe, base: Base) -> None:
    """Raise Refused for references that the base's family does not read, or more than it reads."""
    for name, part in recipe.by_source.items():
        named = references_of(part.source)
        if named and base.family.sees_references and recipe.train.reference_dropout_rate:
            raise Refused(
                f"the embeddings of family {base.family.name} are of the references, too, and its "
                "pipeline draws with references alone: set 0",
                setting="train.reference_dropout_rate",
            )
        with naming_source(name):
            check_number(base.family, len(named), "its settings name")


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
