"""Estimate the disk that a run needs, by stage, from rows, sizes and the base's weight shapes.

docs/scale.md has the arithmetic. Every row counts as a picture with a caption of its own, so that
lists with failures and equal captions need less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from configs.settings.recipe import Recipe, StageName
from configs.settings.train import Train
from runtimes.adapters.lora import choose_layers, layers_of
from runtimes.contract import WrongInput
from runtimes.families import detect_family
from runtimes.pipeline_folder.folder import describe_encoders
from runtimes.pipeline_folder.weights import WeightShapes, weight_shapes
from tasks.base_training_plan import caption_bytes, latent_bytes
from tasks.evaluate.prompts import prompt_sets, sample_prompts

#: Bytes per pixel of photographs in a stored format: jpg and webp at quality 95, png.
PIXEL_BYTES = {"jpg": 0.4, "webp": 0.35, "png": 1.5}
#: Area of a picture as a multiple of image_size squared, for sides of 1 to 1.3.
AREAS = {"keep_ratio": 1.3, "keep_ratio_largest": 0.77}
#: Bytes per sample beside the picture: three headers of a tar, caption, metadata, parquet row.
SAMPLE_BYTES = 3200
#: Bytes per reference picture of the evaluation: 32 x 32 RGB in float32 (memorization), features.
REFERENCE_BYTES = 4 * (32 * 32 * 3 + 768)
#: Bytes of an evaluation beside them: two sheets of small pictures, metrics, resampled values.
SHEET_BYTES = 250_000


@dataclass(frozen=True)
class DiskEstimate:
    """Bytes that a run stores, by stage."""

    rows: int
    stages: dict[StageName, int]

    @property
    def total(self) -> int:
        return sum(self.stages.values())

    def without_stored(self, missing: Mapping[StageName, float]) -> DiskEstimate:
        """What is still needed if a share `missing` of each stage is not stored yet."""
        left = {stage: int(missing[stage] * size) for stage, size in self.stages.items()}
        return replace(self, stages=left)

    @property
    def words(self) -> str:
        """The largest parts, such as `encode 3.1 GB, train 2.0 GB`."""
        return ", ".join(f"{stage} {in_words(size)}" for stage, size in self.stages.items())


def estimate_disk(
    recipe: Recipe,
    model: Path,
    vae: Path | None,
    rows: int,
    stages: Sequence[StageName],
    trials: Sequence[Recipe] = (),
) -> DiskEstimate:
    """The disk that a run needs in its store.

    Args:
        model: local folder of the base pipeline.
        vae: folder of the VAE that replaces the pipeline's own.
        rows: of the source.
        stages: those that the run builds.
        trials: of a sweep, the recipes that are trained and measured; one of them is published.

    Raises:
        WrongInput: the base's configs are invalid, or a prompt file cannot be read.
    """
    info = describe_encoders(model, vae)
    trained = [(one, _trained_parameters(one.train, model)) for one in trials or (recipe,)]
    encoded = rows * (latent_bytes(recipe, info) + caption_bytes(recipe, info))
    sizes: dict[StageName, int] = {
        "download": rows * _picture_bytes(recipe),
        "encode": encoded,
        "train": sum(_training_bytes(one, numbers, rows) for one, numbers in trained),
        "evaluate": len(trained) * _evaluation_bytes(recipe, rows),
        "publish": max(_published_bytes(one, model, numbers) for one, numbers in trained),
    }
    return DiskEstimate(rows, {stage: sizes[stage] for stage in stages})


def _picture_bytes(recipe: Recipe) -> int:
    settings = recipe.download
    area = AREAS.get(settings.resize_mode, 1.0) * settings.image_size**2
    return int(area * PIXEL_BYTES[settings.encode_format]) + SAMPLE_BYTES


def _training_bytes(recipe: Recipe, trained: int, rows: int) -> int:
    """Checkpoints, with the one that is being written, the trained weights and samples."""
    settings = recipe.train.with_steps(rows)
    arrays = 4.0 * trained * (1 + (settings.ema_decay is not None)) + moment_bytes(
        settings, trained
    )
    checkpoints = settings.checkpoints_total_limit + settings.kept_best + 1
    drawn = 0
    if settings.sample_every_n_steps:
        times = settings.steps // settings.sample_every_n_steps
        drawn = times * len(sample_prompts(recipe)) * _drawn_bytes(recipe)
    return int(checkpoints * arrays) + 4 * trained + drawn


def moment_bytes(settings: Train, trained: int) -> float:
    """Bytes of the optimizer's state on disk."""
    return trained * {"adamw": 8.0, "adamw_8bit": 2.03, "adafactor": 0.01}[settings.optimizer]


def _evaluation_bytes(recipe: Recipe, rows: int) -> int:
    """Pictures of base and tuned model, features of the references, and the sheets."""
    pictures = sum(map(len, prompt_sets(recipe).values()))
    return 2 * pictures * _drawn_bytes(recipe) + rows * REFERENCE_BYTES + SHEET_BYTES


def _drawn_bytes(recipe: Recipe) -> int:
    return int(PIXEL_BYTES["png"] * recipe.encode.resolution**2)


def _published_bytes(recipe: Recipe, model: Path, trained: int) -> int:
    """The artifact, and its copy in a registry within the store."""
    publish, train = recipe.publish, recipe.train
    width = 4 if publish.dtype == "float32" else 2
    parts = sorted(folder for folder in model.iterdir() if folder.is_dir())
    whole = width * sum(math.prod(shape) for part in parts for shape in _shapes(part).values())
    adapters = width * trained if train.method == "lora" else 0
    size = adapters if train.method == "lora" and not publish.merge else whole + adapters
    return size * (2 if publish.registry is None else 1)


def _trained_parameters(settings: Train, model: Path) -> int:
    """Numbers that training changes."""
    family = detect_family(model)
    parts = (family.denoiser, *(family.clip_encoders if settings.train_text_encoder else ()))
    return sum(_trained_in(part, _shapes(model / part), settings, model) for part in parts)


def _trained_in(part: str, shapes: WeightShapes, settings: Train, model: Path) -> int:
    if settings.method == "full" or not shapes:
        return sum(map(math.prod, shapes.values()))
    family, layers = detect_family(model), layers_of(shapes)
    chosen = choose_layers(part, layers, settings.lora, family.attention_layers)
    rank, rows = settings.lora.rank, settings.lora.dora
    weights = (shapes[f"{name}.weight"] for name in chosen)
    sizes = ((shape[0], math.prod(shape[1:])) for shape in weights)
    return sum(rank * (out + into) + out * rows for out, into in sizes)


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    try:
        return weight_shapes(folder)
    except WrongInput:  # another stage reports a damaged file
        return {}


def in_words(size: float) -> str:
    """A number of bytes, such as `12 B`, `139 MB` or `3.1 GB`."""
    units = ("B", "kB", "MB", "GB", "TB")
    power = 0
    while size >= 999.5 and power < 4:
        size /= 1000
        power += 1
    digits = f"{size:.1f}".removesuffix(".0") if size < 99.95 else f"{size:,.0f}"
    return f"{digits} {units[power]}"
