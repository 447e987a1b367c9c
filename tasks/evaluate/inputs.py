"""The inputs of an evaluation, and what two evaluations must share for comparable metrics.

The inputs exclude the trained weights. Comparable evaluations share sampling settings, data and
models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from artifacts.latent_shards import open_latents
from artifacts.models import digest_model, digest_model_file
from artifacts.records import digest_json
from artifacts.store import Artifact
from configs.settings.recipe import Recipe
from runtimes.families.inpainting_aesthetics import ExtraInputs
from runtimes.objective.noise_schedule import Schedule, read_schedule, schedule_facts
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import GenerateJob
from tasks.control_pictures import ControlPictures, local_files
from tasks.encode.crop_to_bucket import TransformSettings
from tasks.encode.references import ReferenceSettings
from tasks.evaluate import draw, edits
from tasks.evaluate.features import digest_image_encoder
from tasks.evaluate.held_out_edits import held_out_prompts
from tasks.evaluate.judges import judge_names
from tasks.evaluate.metrics import LEVELS, PromptSets, all_prompts, compared_sets, prompt_rounds
from tasks.pictures import Pictures
from tasks.trained_weights import BASE, TrainedWeights, weights_content


@dataclass(frozen=True)
class MeasuringModels:
    """Local copies of the models that measure pictures."""

    clip: Path  # CLIPModel folder
    image_encoder: Path | None = None  # vision model folder; None: clip
    preference_models: Mapping[str, Path] = field(default_factory=dict)  # judge -> CLIPModel folder
    inception: Path | None = None  # weights file; None: no metrics of Inception
    sibling: Base | None = None  # on which adapters are measured, too

    def digests(self) -> dict[str, str]:
        """Name -> sha256 of the models."""
        folders = {"clip": self.clip}
        folders |= {f"judge {name}": path for name, path in self.preference_models.items()}
        digests = {name: digest_model(path) for name, path in folders.items()}
        if self.image_encoder is not None:
            digests["image_encoder"] = digest_image_encoder(self.image_encoder)
        if self.inception is not None:
            digests["inception"] = digest_model_file(self.inception)
        if self.sibling is not None:
            digests["sibling"] = draw.digest_eval_model(self.sibling, None)
        return digests


@dataclass(frozen=True)
class EvalInputs:
    """A recipe, its data and its models."""

    recipe: Recipe
    images: Artifact  # with the held-out pictures
    latents: Artifact  # with the held-out latents
    base: Base
    measuring: MeasuringModels
    training_images: Artifact | None = None  # with the training pictures; None: images
    training_latents: Artifact | None = None  # of the training pictures; None: latents
    rounds: int = 1  # of drawing

    @cached_property
    def held_out(self) -> Pictures:
        """The pictures of the latents with the held-out ones."""
        return Pictures.of(self.latents, self.images)

    @cached_property
    def training(self) -> Pictures:
        """The pictures among which copies of training pictures are searched."""
        if self.training_images is None:
            return self.held_out
        return Pictures.of(self.training_latents or self.latents, self.training_images)

    @cached_property
    def prompts(self) -> tuple[PromptSets, ...]:
        """The prompts of each round; those of held-out samples are read from their pictures.

        Raises Refused if no sample is held out for a set of them.
        """
        settings = self.recipe.evaluate
        sets = settings.prompts.items()
        wanted = {name: chosen.held_out for name, chosen in sets if chosen.held_out}
        most = max(wanted.values(), default=0)
        about = (self.recipe, self.latents, self.held_out, most)
        held_out = held_out_prompts(*about) if wanted else []
        found = {name: held_out[:count] for name, count in wanted.items()}
        return prompt_rounds(settings, self.rounds, found)

    @cached_property
    def files(self) -> edits.Files:
        """The local files of the prompts' pictures."""
        return edits.read_files(all_prompts(*self.prompts))

    @property
    def left_out(self) -> set[str]:
        """Sha256 (hex) of pictures in the split `train` that training leaves out."""
        latents = self.training_latents or self.latents
        return open_latents(latents.uri).left_out

    @cached_property
    def controls(self) -> ControlPictures | None:
        """What a ControlNet follows in the evaluation; None for another training."""
        recipe = self.recipe
        if recipe.train.method != "controlnet":
            return None
        factor = self.base.encoders["size_step"]
        return ControlPictures.read(self.held_out.by_source, recipe, factor)

    def digests(self) -> dict[str, str]:
        """Input name -> sha256 of its content."""
        trained_on = self.training_latents
        return {
            "images": self.images.digest,
            "training_images": self.training.images.digest,
            "latents": self.latents.digest,
            **_choices(held_out=self.held_out, training=self.training),
            **({"training_latents": trained_on.digest} if trained_on is not None else {}),
            **model_digests(self.base),
            **self.measuring.digests(),
        }

    @property
    def loss_facts(self) -> dict[str, Any]:
        """The facts that define the held-out loss of the model in training."""
        train = self.recipe.train
        schedule = self.base.schedule(train)
        return _loss_facts(schedule, self.base, ExtraInputs.from_settings(train))

    def model(
        self, trained: Artifact | None = None, weights: TrainedWeights = BASE
    ) -> draw.EvalModel:
        """The base, or the model with the weights of a train artifact."""
        content = None if trained is None else weights_content(trained)
        return draw.EvalModel(draw.digest_eval_model(self.base, content), self.base, weights)


def _choices(**pictures: Pictures) -> dict[str, str]:
    """Name and digest of each choice of pictures, where a recipe selects."""
    digests = ((name, some.digest) for name, some in pictures.items())
    return {f"{name}_choice": digest for name, digest in digests if digest is not None}


def model_digests(base: Base) -> dict[str, str]:
    """`base` and, if it is separate, `vae` -> sha256 of their content."""
    vae = {} if base.vae_folder is None else {"vae": digest_model(base.vae_folder)}
    return {"base": draw.digest_pipeline(base), **vae}


#: Increment when the pictures, the definition of a metric, or its interval changes.
VERSION = 7


def sampling_specs(inputs: EvalInputs) -> list[draw.SamplingSpec]:
    """The sampling settings of each round, equal for all models; the first has the losses."""
    recipe = inputs.recipe
    latents = inputs.latents
    settings = recipe.evaluate
    job = GenerateJob(
        runtime=recipe.runtime,
        **inputs.base.job_fields,
        drawings=(),
        prompts=(),
        sampler=draw.sampler_settings(settings, "batch_size"),
        device=settings.device,
        dtype=settings.dtype,
        flash_attention=recipe.train.mindspore.flash_attention,
        offload=settings.offload,
    )
    losses: dict[str, Any] = {}
    if open_latents(latents.uri).held_out > 0:
        holdout = {
            "samples": settings.holdout_samples,
            "levels": LEVELS,
            "seed": settings.seed,
            **recipe.train.holdout_loss_inputs,
        }
        text_dtype = recipe.encode.text_dtype
        losses = {"latents": latents.uri, "holdout": holdout, "text_dtype": text_dtype}
    specs = list[draw.SamplingSpec]()
    first = 0
    for sets in inputs.prompts:
        prompts = all_prompts(sets)
        texts = tuple(prompt.text for prompt in prompts)
        own = replace(job, prompts=texts, first=first, **({} if first else losses))
        facts = edits.key_facts(prompts, inputs.files)
        if "references" in facts:
            paths = (tuple(inputs.files[place].path for place in p.references) for p in prompts)
            limits = ReferenceSettings.of(recipe, inputs.base)
            sizes: dict[str, Any] = {
                "reference_pixels": limits.pixels,
                "reference_step": limits.step,
            }
            own = replace(own, references=tuple(paths), **sizes)
        if inputs.controls is not None:
            own = replace(own, controls=local_files(inputs.controls.of(texts)))
        about = (latents.digest, inputs.base.family.key_facts, facts.get("references"))
        specs.append(draw.SamplingSpec(own, *about))
        first += len(prompts)
    return specs


def sibling_specs(inputs: EvalInputs) -> list[draw.SamplingSpec]:
    """The same on the sibling, with its sampler and without losses."""
    sampler = draw.sampler_settings(inputs.recipe.evaluate.on_sibling, "batch_size")
    return [
        replace(spec, job=replace(spec.job, sampler=sampler, latents=None, holdout={}))
        for spec in sampling_specs(inputs)
    ]


def sibling_facts(recipe: Recipe) -> dict[str, Any]:
    """How pictures of the sibling are drawn, if there is one."""
    sampling = recipe.evaluate.on_sibling
    has_sibling = recipe.evaluate.model is not None
    return {"sibling": draw.sampler_settings(sampling)} if has_sibling else {}


def _loss_facts(schedule: Schedule, base: Base, extras: ExtraInputs) -> dict[str, Any]:
    """The facts that define a held-out loss; losses are comparable only if they are equal."""
    encoders = dict(base.encoders)
    return {"schedule": schedule_facts(schedule), "encoders": encoders, "sees": extras.facts}


def fingerprint(inputs: EvalInputs) -> str:
    """sha256 of all facts that two evaluations must share for comparable metrics."""
    recipe = inputs.recipe
    first, *more = (
        {
            "sampling": spec.facts(),
            "sets": texts_of(sets),
            **edits.key_facts(all_prompts(sets), inputs.files),
        }
        for spec, sets in zip(sampling_specs(inputs), inputs.prompts, strict=True)
    )
    return digest_json(
        {
            "version": VERSION,
            **first,
            **({"more_rounds": more} if more else {}),
            "compared": list(compared_sets(recipe.evaluate)),
            "models": inputs.measuring.digests(),
            "reference": inputs.images.digest,
            **_choices(held_out=inputs.held_out),
            "transform": transforms_of(recipe),
            "judges": judge_names(recipe.evaluate.judges),
            "memorization": recipe.evaluate.memorization.model_dump(mode="json"),
            "bootstrap": recipe.evaluate.bootstrap,
            "loss": inputs.loss_facts,
            **sibling_facts(recipe),
        }
    )


def texts_of(sets: PromptSets) -> dict[str, list[str]]:
    """Prompt set name -> the text of every picture's prompt."""
    return {name: [prompt.text for prompt in prompts] for name, prompts in sets.items()}


def transforms_of(recipe: Recipe) -> dict[str, Any]:
    """How the pictures are cropped; of a mixture, those of each source that is learnt."""
    if not recipe.sources:
        return TransformSettings.of(recipe).facts
    parts = recipe.by_source
    return {name: TransformSettings.of(parts[name]).facts for name in recipe.learnt}


def same_loss(inputs: EvalInputs, model: draw.EvalModel) -> bool:
    """Whether a model has the prediction and the inputs of the model in training."""
    schedule = read_schedule(model.part("scheduler"))
    return _loss_facts(schedule, model.base, model.extras) == inputs.loss_facts
