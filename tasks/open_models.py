"""The models that a recipe names: opened at most once, and checked against its settings."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from artifacts import models
from configs.errors import Refused, naming
from configs.preflight import Check, Finding, fine, note
from configs.secrets import without_secrets
from configs.settings.evaluate import Evaluate
from configs.settings.recipe import Publish, Recipe, StageName
from configs.settings.train import Train
from configs.settings.train_parts import HOLDOUT_LOSS
from runtimes import registry
from runtimes.families.extra_inputs import ExtraInputs
from runtimes.objective import noise_schedule
from runtimes.objective.training_objective import LatentScale, Objective
from runtimes.pipeline_folder.folder import Base, replacement_config
from runtimes.pipeline_folder.weights import check_tokenizers, check_weights, stored_weight_files
from tasks import train
from tasks.encode.transform import TransformSettings, bucket_sizes
from tasks.evaluate import stage as evaluate
from tasks.evaluate.features import check_clip, check_image_encoder
from tasks.evaluate.inception import check_inception, fidelity_folder
from tasks.evaluate.inputs import MeasuringModels
from tasks.publish.assemble import model_parts
from tasks.publish.model_card import UNKNOWN_LICENSE, license_conflict, shown_license
from tasks.publish.promotion_gate import parse_rule


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
            yield Check(setting, partial(self._check_place, setting), remote="://" in path)
        yield Check("base", self._check_base)
        if (named := self.recipe.evaluate.inception) is not None:
            find = partial(self._check_inception, named)
            yield Check("evaluate.inception", find, remote="://" in named)
        yield Check("measuring models", self._check_measuring)

    @cached_property
    def base(self) -> Base:
        """The base, opened with the recipe's VAE. Raises Refused or Away."""
        vae = self._folder("model.vae") if "model.vae" in self._places else None
        model = self._folder("model.path")
        with naming("model.path" if vae is None else "model.path or model.vae"):
            base = Base.open(model, vae)
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
        )

    def can_open(self, section: str) -> bool:
        """Whether the models of a section, `model` or `evaluate`, may be opened."""
        named = [place for name, place in self._places.items() if name.startswith(f"{section}.")]
        try:
            return self.fetch or all(models.local_model(path) is not None for path, _ in named)
        except Refused:  # of `_check_place`
            return False

    @cached_property
    def _places(self) -> Mapping[str, tuple[str, str | None]]:
        """Setting -> folder, hub id or URL of a model, and its revision."""
        model = self.recipe.model
        measured = self.recipe.evaluate
        judges = {_judge(name): path for name, path in measured.preference_models.items()}
        paths = {
            "model.vae": model.vae,
            "evaluate.clip": measured.clip,
            "evaluate.image_encoder": measured.image_encoder,
            **judges,
        }
        others = {setting: (path, None) for setting, path in paths.items() if path is not None}
        return {"model.path": (model.path, model.revision), **others}

    def _folder(self, setting: str) -> Path:
        path, revision = self._places[setting]
        with naming(setting):
            return models.resolve_model(path, revision=revision)

    def _check_place(self, setting: str) -> Iterator[Finding]:
        path, revision = self._places[setting]
        if not self.fetch:
            with naming(setting, f"set {setting} to a folder, URL or hub id"):
                where = models.check_model_available(path, revision=revision)
            yield fine(f"{setting}: {without_secrets(path)} ({where})")

    def _check_base(self) -> Iterator[Finding]:
        if not self.can_open("model"):
            return
        recipe = self.recipe
        drawn = recipe.evaluate
        base = self.base
        for device in (recipe.train.device, drawn.device):
            registry.check_family(recipe.runtime, base.family.name, device)
        sizes = bucket_sizes(TransformSettings.of(recipe), base.encoders["size_step"])
        largest = max(map(max, sizes))
        _check_position_embeddings(recipe.train, drawn, base, largest)
        evaluate.check_drawn_size(drawn, base)
        _check_weights(base)
        check_tokenizers(base)
        _check_objective(recipe, base)
        for config in (
            base.scheduler,
            noise_schedule.scheduler_config(base.scheduler, recipe.train),
        ):
            registry.check_scheduler(
                recipe.runtime, config, drawn.scheduler, drawn.num_inference_steps
            )
        train.check(recipe, base)
        if "train" in self.stages:
            yield from train.notes_of_kohya(recipe.train, base)
        yield from _check_license(recipe.publish, base.folder)

    def _check_inception(self, named: str) -> Iterator[Finding]:
        with naming("evaluate.inception"):
            where = models.check_file_available(named)
        yield fine(f"evaluate.inception: {without_secrets(named)} ({where})")
        if "evaluate" in self.stages:
            fidelity_folder()

    def _check_measuring(self) -> None:
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
    shift = noise_schedule.ResolutionShift.from_config(base.scheduler, patch)
    tuned = base.schedule(recipe.train)
    Objective.of(recipe.train, tuned, LatentScale(1.0), shift)
    if recipe.encode.holdout:  # evaluation computes the base's loss
        Objective(base.schedule(), LatentScale(1.0), seed=0)
    if noise_schedule.schedule_facts(base.schedule()) != noise_schedule.schedule_facts(tuned):
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


def _check_license(settings: Publish, base: Path) -> Iterator[Finding]:
    if settings.require_license and shown_license(settings, base) == UNKNOWN_LICENSE:
        raise Refused(
            "publish.require_license: neither publish.license nor the base's card has a licence"
        )
    if (conflict := license_conflict(settings, base)) is not None:
        yield note(conflict)
