"""What the plans of all kinds of accelerator share: duration, disk, cost and their cache.

The disk that a run needs is estimated by stage, from rows, sizes and the base's weight shapes.
docs/large-lists.md has the arithmetic. Every row counts as a picture with a caption of its own,
so that lists with failures and equal captions need less.
"""

from __future__ import annotations

import json
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from artifacts.models import files_below, resolve_configs
from artifacts.records import digest_json, read_record, write_record
from artifacts.store import Store
from configs.errors import Away, Refused
from configs.load_recipe import CHECKOUT, load_recipe, recipe_names
from configs.settings.data import Download, Encode, references_of
from configs.settings.recipe import Publish, Recipe, StageName
from configs.settings.train import Train
from runtimes.adapters.lora import choose_layers, layers_of
from runtimes.families import Family, family_named
from runtimes.pipeline_folder.folder import CHUNKS, Base
from runtimes.pipeline_folder.single_file import resolve_base
from runtimes.pipeline_folder.weights import WeightShapes, weight_shapes
from runtimes.process.questions import GpuStepRequest, TpuStepRequest
from runtimes.sample.reference_pictures import ReferenceLimits
from tasks.download.references import recipe_of_references
from tasks.evaluate.metrics import prompt_sets, sample_prompts
from tasks.train import control_shapes

log = logging.getLogger("kiln")
#: Receives a message before each computation, which takes seconds to minutes.
Say = Callable[[str], None]


class TrainingPlan(ABC):
    """Duration, storage and cost of a recipe's training on some accelerators."""

    recipe: Recipe
    info: Mapping[str, Any]  # of the encoders, `Base.encoders`

    @property
    @abstractmethod
    def chips(self) -> int:
        """Number of accelerators."""

    @property
    @abstractmethod
    def step_seconds(self) -> float | None:
        """Seconds per step; None if unknown."""

    @property
    @abstractmethod
    def assumption(self) -> str:
        """The assumption behind `step_seconds`."""

    @property
    @abstractmethod
    def fits(self) -> bool:
        """Whether each accelerator's memory is enough."""

    @property
    def steps(self) -> int | None:
        """Steps of the run; None for `train.epochs` without `plan.pictures`."""
        train = self.recipe.train
        pictures = self.recipe.plan.pictures
        if train.epochs is not None and pictures is None:
            return None
        return train.with_steps(pictures or 0).steps

    @property
    def hours(self) -> float | None:
        return self.step_seconds and self.steps and self.step_seconds * self.steps / 3600

    @property
    def cost(self) -> float | None:
        price = self.recipe.plan.chip_hour_price
        return None if price is None else self.hours and self.hours * self.chips * price

    @property
    def bytes_per_picture(self) -> int:
        """Stored bytes per picture with one caption."""
        return self.latent_bytes + self.recipe.encode.variants * self.caption_bytes

    @property
    def latent_bytes(self) -> int:
        """Stored bytes of latents per picture."""
        return latent_bytes(self.recipe.encode, self.info)

    @property
    def caption_bytes(self) -> int:
        """Stored bytes of a caption; a shard stores equal captions once."""
        return caption_bytes(self.recipe.encode, self.info)

    @property
    def storage_bytes(self) -> int | None:
        """Stored bytes of all pictures; None without `plan.pictures`."""
        pictures = self.recipe.plan.pictures
        return None if pictures is None else pictures * self.bytes_per_picture


def latent_bytes(encode: Encode, info: Mapping[str, Any]) -> int:
    """Stored bytes of latents per picture: 16-bit moments, masks with masked means.

    Args:
        info: of the encoders, `Base.encoders`.
    """
    pixels = (encode.resolution // info["vae_scale_factor"]) ** 2
    moments = 2 * 2 * info["latent_channels"] * pixels
    masked = encode.masks * (1 + 2 * info["latent_channels"]) * pixels
    return int(moments + masked) * (2 if encode.flip else 1)


def caption_bytes(encode: Encode, info: Mapping[str, Any]) -> int:
    """Stored bytes of a caption: its 16-bit embeddings, or its 32-bit token ids alone.

    Args:
        info: of the encoders, `Base.encoders`.
    """
    if encode.text == "token_ids":
        marks = 2 * (CHUNKS[encode.max_tokens] - 1)  # between the chunks
        return int(4 * len(family_named(info["family"]).clip) * (info["tokens"] + marks))
    return int(2 * (info["tokens"] * info["prompt_dim"] + (info["pooled_dim"] or 0)))


def open_configs(recipe: Recipe) -> Base:
    """The base with the recipe's VAE; from a model on the hub, only configs are fetched.

    Those of the shipped recipes' models are there without the hub, or access to the model.

    Raises:
        Refused: the base or the VAE does not exist.
        Refused: the base is no pipeline of a known family.
        Away: the hub or a store does not answer now.
    """
    model = recipe.model
    try:
        folder = resolve_base(model, configs=True)
        vae = None if model.vae is None else resolve_configs(model.vae)
    except (Refused, Away) as error:
        shipped = [load_recipe(name).model for name in recipe_names()]
        if (model.path, model.vae) not in [(known.path, known.vae) for known in shipped]:
            raise
        log.warning("%s; the plan is made of the configs that come with Kilnworks", error)
        folder = _shipped_configs(model.path)
        vae = None if model.vae is None else _shipped_configs(model.vae)
    return Base.open(folder, vae, **recipe.encode.reading)


def _shipped_configs(path: str) -> Path:
    return CHECKOUT / "bench/models" / path.rpartition("/")[2]


def load_or_compute(
    store: Store, key: str, compute: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """A record of the store's cache of plans, computed and written if it is not there."""
    path = f"{store.root}/plans/{key}.json"
    try:
        record = read_record(store.fs, path)
    except ValueError:  # a damaged record is replaced
        record = None
    if record is None:
        record = {"plan": compute()}
        write_record(store.fs, path, record)
    return dict(record["plan"])


def planned_references(recipe: Recipe) -> tuple[tuple[int, int], ...]:
    """(height, width) in pixels of the references of a planned step: the most that a picture has.

    Each is a square of the largest area. Their number is `plan.references`, or else one for each
    column, folder or extension.
    """
    most: tuple[tuple[int, int], ...] = ()
    for part in recipe.by_source.values():
        encode = part.encode
        limits = ReferenceLimits(encode.reference_pixels, encode.bucket_step)
        side = math.isqrt(encode.reference_pixels)
        count = len(references_of(part.source))
        count = count and (recipe.plan.references or count)
        most = max(most, (limits.size_of(side, side),) * count, key=len)
    return most


def cache_key(
    version: int, request: GpuStepRequest | TpuStepRequest, versions: Mapping[str, Any]
) -> str:
    """A digest of a request, the contents of its folders' configs and the package versions.

    Args:
        version: the planner's version.
        versions: those of the packages that affect the plan.
    """
    there = [folder for folder in (request.model, request.vae) if folder is not None]
    settings = {**asdict(request), "model": None, "vae": None}
    if not request.references:  # older plans are equal
        del settings["references"]
    configs = {
        f"{number}/{path.relative_to(folder)}": json.loads(path.read_text(encoding="utf-8"))
        for number, folder in enumerate(there)
        for path in files_below(Path(folder))
        if path.name.endswith("config.json") or path == Path(folder, "model_index.json")
    }
    return digest_json([version, settings, configs, versions])


#: Bytes per pixel of photographs in a stored format: jpg and webp at quality 95, png.
PIXEL_BYTES = {"jpg": 0.4, "webp": 0.35, "png": 1.5}
#: Area of a picture as a multiple of image_size squared, for sides of 1 to 1.3.
AREAS = {"keep_ratio": 1.3, "keep_ratio_largest": 0.77}
#: Bytes of the optimizer's state in a checkpoint per trained value; a checkpoint holds each value
#: in four bytes, those of 8-bit moments and of their blocks' scales too. Factored moments and
#: Muon's are those of SDXL's convolutions and matrices.
MOMENTS = {
    "adamw": 8.0,
    "adamw_8bit": 8.03,
    "adamw_schedule_free": 8.0,
    "adafactor": 0.4,
    "came": 4.8,
    "lion": 4.0,
    "lion_8bit": 4.02,
    "muon": 8.0,
    "prodigy": 16.0,
}
#: Bytes per sample beside the picture: three headers of a tar, caption, metadata, parquet row.
SAMPLE_BYTES = 3200
#: Bytes per reference picture of the evaluation: 32 x 32 RGB in float32 (memorization), features.
REFERENCE_BYTES = 4 * (32 * 32 * 3 + 768)
#: Bytes of an evaluation beside them: two sheets of small pictures, metrics, resampled values.
SHEET_BYTES = 250_000
#: Bytes per picture of a perceptual hash with its thumbnail, an embedding of 768 numbers and some
#: scores; of a row of a selection; of the captions of a few prompts.
DESCRIPTION_BYTES = 2_000
SELECTION_BYTES = 100
CAPTION_BYTES = 1_000


def estimate_disk(
    recipe: Recipe,
    base: Base,
    rows: int,
    stages: Sequence[StageName],
    trials: Sequence[Recipe] = (),
    trained: int | None = None,
    references: int = 0,
) -> dict[StageName, int]:
    """The bytes that each stage of a run needs in its store.

    Args:
        rows: the number of rows in the source.
        stages: those that the run builds.
        trials: the recipes of a sweep that are trained and measured; the best is published.
        trained: numbers that training changes, as of a plan; None: read from the base's weights.
        references: the number of distinct references of the rows.

    Raises:
        Refused: the base's configs are invalid, or a prompt file cannot be read.
    """
    info = base.encoders
    trainings = [
        (trial, _trained_parameters(trial.train, base) if trained is None else trained)
        for trial in trials or (recipe,)
    ]
    encode = recipe.encode
    of_reference = 2 * encode.reference_pixels * info["latent_channels"]
    of_reference //= info["vae_scale_factor"] ** 2
    drawn = int(PIXEL_BYTES["png"] * encode.resolution**2)
    sampled = len(sample_prompts(recipe.evaluate)) * drawn
    measured = sum(map(len, prompt_sets(recipe.evaluate).values())) * drawn
    models = 2 if recipe.evaluate.model is None else 4
    published = (
        _published_bytes(recipe.publish, trial.train.method, base.folder, numbers)
        for trial, numbers in trainings
    )
    sizes: dict[StageName, int] = {
        "download": rows * _picture_bytes(recipe.download)
        + references * _picture_bytes(recipe_of_references(recipe).download),
        "describe": rows * DESCRIPTION_BYTES,
        "select": rows * SELECTION_BYTES,
        "caption": rows * CAPTION_BYTES,
        "encode": rows
        * (latent_bytes(encode, info) + encode.variants * caption_bytes(encode, info))
        + references * of_reference,
        "train": sum(_training_bytes(trial.train, n, rows, sampled) for trial, n in trainings),
        "evaluate": len(trainings) * (models * measured + rows * REFERENCE_BYTES + SHEET_BYTES),
        "publish": max(published),
    }
    return {stage: sizes[stage] for stage in stages if stage in recipe.stages}


def _picture_bytes(download: Download) -> int:
    """Bytes of a picture in its image shard."""
    area = AREAS.get(download.resize_mode, 1.0) * download.image_size**2
    return int(area * PIXEL_BYTES[download.encode_format]) + SAMPLE_BYTES


def _training_bytes(settings: Train, trained: int, rows: int, sampled: int) -> int:
    """Bytes of the checkpoints, also of the one in progress, of trained weights and samples.

    Args:
        sampled: bytes of the samples at one step.
    """
    settings = settings.with_steps(rows)
    moments = int(MOMENTS[settings.optimizer] * trained)
    checkpoints = settings.checkpoints_total_limit + settings.kept_best + 1
    every = settings.sample_every_n_steps
    drawn = settings.steps // every * sampled if every else 0
    return checkpoints * checkpoint_bytes(settings, trained, moments) + 4 * trained + drawn


def checkpoint_bytes(settings: Train, trained: int, moments: int) -> int:
    """Bytes of a checkpoint on disk: trained weights, moments of the optimizer, and the average.

    Args:
        trained: number of trained values; each takes four bytes.
        moments: bytes of the optimizer's state, in four bytes for each value.
    """
    return 4 * trained * (1 + settings.keeps_average) + moments


def _published_bytes(publish: Publish, method: str, folder: Path, trained: int) -> int:
    """The artifact, and its copy in a registry within the store."""
    width = 4 if publish.dtype == "float32" else 2
    parts = sorted(part for part in folder.iterdir() if part.is_dir())
    whole = width * sum(math.prod(shape) for part in parts for shape in _shapes(part).values())
    alone = method == "controlnet" or (method == "lora" and not publish.merge)
    beside = 0 if method == "full" else width * trained
    size = beside if alone else whole + beside
    return size * (2 if publish.registry is None else 1)


def _trained_parameters(settings: Train, base: Base) -> int:
    """Numbers that training changes."""
    family = base.family
    if settings.method == "controlnet":
        return sum(map(math.prod, control_shapes(settings, base).values()))
    parts = (family.denoiser, *(family.clip_encoders if settings.train_text_encoder else ()))
    return sum(_trained_in(part, _shapes(base.part(part)), settings, family) for part in parts)


def _trained_in(part: str, shapes: WeightShapes, settings: Train, family: Family) -> int:
    if settings.method == "full" or not shapes:
        return sum(map(math.prod, shapes.values()))
    layers = layers_of(shapes)
    chosen = choose_layers(part, layers, settings.lora, family.attention_layers)
    rank = settings.lora.rank
    rows = settings.lora.dora
    weights = (shapes[f"{name}.weight"] for name in chosen)
    sizes = ((shape[0], math.prod(shape[1:])) for shape in weights)
    return sum(rank * (out + into) + out * rows for out, into in sizes)


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    try:
        return weight_shapes(folder)
    except Refused:  # another stage reports a damaged file
        return {}
