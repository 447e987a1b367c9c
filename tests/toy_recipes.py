"""Overrides that shrink shipped recipes: tiny models, few pictures and steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.load_recipe import load_recipe
from configs.settings.recipe import Model, Recipe
from runtimes.pipeline_folder.folder import Base

Overrides = dict[str, Any]
#: Recipe -> model of tests/tiny_models.py in its layout; minimal ones where XLA compiles.
BASES = {
    "sd2": "least-sd",
    "sd2-v5p": "least-sd",
    "sd15-lora": "least-sd",
    "laion-jax": "least-sd",
    "sdxl": "tiny-sdxl",
    "sdxl-lora": "tiny-sdxl",
    "sdxl-lora-8gb": "tiny-sdxl",
    "sdxl-lora-text": "tiny-sdxl",
    "sdxl-v5p": "tiny-sdxl",
    "sd35-lora": "tiny-sd3",
    "flux-lora": "tiny-flux",
    **dict.fromkeys((f"flux-lora-{size}gb" for size in (12, 16, 24)), "tiny-flux"),
    "flux-schnell": "tiny-flux-schnell",
    "kontext-lora": "tiny-flux-kontext",
    "flux2-klein": "tiny-flux2",
    "flux2-klein-edit-lora": "tiny-flux2",
    **dict.fromkeys((f"flux2-klein-{size}gb" for size in (8, 12, 16)), "tiny-flux2"),
    "z-image-lora": "tiny-z-image",
    **dict.fromkeys((f"z-image-lora-{size}gb" for size in (8, 12, 16)), "tiny-z-image"),
    "qwen-image-lora": "tiny-qwen-image",
    **dict.fromkeys((f"qwen-image-lora-{size}gb" for size in (16, 24)), "tiny-qwen-image"),
    "qwen-image-edit-lora": "tiny-qwen-image-edit",
}
#: Sizes, counts and intervals; they replace settings that a recipe sets.
TOY: Overrides = {
    "download.image_size": 32,
    "download.min_image_size": 16,
    "download.shard_size": 4,
    "encode.resolution": 32,
    "encode.batch_size": 4,
    "train.steps": 4,
    "train.global_batch_size": 4,
    "train.micro_batch_size": 2,
    "train.lr_warmup_steps": 1,
    "train.logging_steps": 1,
    "train.checkpointing_steps": 2,
    "train.sample_every_n_steps": 2,
    "train.holdout_loss.every_n_steps": 2,
    "evaluate.height": 32,
    "evaluate.width": 32,
    "evaluate.num_inference_steps": 2,
    "evaluate.batch_size": 4,
    "evaluate.prompts.new.images_per_prompt": 1,
    "evaluate.prompts.old.images_per_prompt": 1,
    "evaluate.prompts.scenes.images_per_prompt": 1,
}
#: Settings whose defaults are too large for a test; a smaller share holds out too few pictures.
REDUCED: Overrides = {"encode.holdout": 0.3, "evaluate.bootstrap": 5, "evaluate.holdout_samples": 4}
#: Random weights would fail a gate. Other tests check the rules and the smoke test.
OPEN_GATE: Overrides = {
    "publish.gate": [],
    "publish.smoke_test": False,
    "publish.require_license": False,  # tiny models have no card
}


def drawn_by(recipe: Recipe) -> tuple[Model, str]:
    """What the smoke test knows of a recipe."""
    return recipe.model, recipe.evaluate.device


def toy(name: str, store: Path, source: Overrides, tiny_model: Callable[[str], Path]) -> Overrides:
    """Overrides of the shipped recipe `name`."""
    recipe = load_recipe(name)
    model: Overrides = {"model.path": str(tiny_model(BASES[name]))}
    if recipe.model.vae is not None:
        model["model.vae"] = str(tiny_model("tiny-vae"))
    sizes = {dotted: value for dotted, value in TOY.items() if _is_set(recipe, dotted)}
    if recipe.encode.aspect_buckets:
        sizes["encode.bucket_step"] = 8
    return {
        **model,
        **sizes,
        **REDUCED,
        **OPEN_GATE,
        "evaluate.clip": str(tiny_model("tiny-clip")),
        "source": source,
        "store": str(store),
    }


def base_of(recipe: Recipe) -> Base:
    """The base of a recipe whose models are local folders."""
    vae = recipe.model.vae
    return Base.open(Path(recipe.model.path), None if vae is None else Path(vae))


def digits(folder: Path, *gate: str, **settings: Any) -> Recipe:
    """The recipe `digits` with a store in the folder and these rules, without smoke test.

    Args:
        settings: dotted ones, and those of `publish`.
    """
    given = {n if "." in n else f"publish.{n}": value for n, value in settings.items()}
    quick = {"publish.smoke_test": False, "publish.gate": list(gate)}
    return load_recipe("digits", {"store": str(folder / "store"), **quick, **given})


def _is_set(recipe: Recipe, dotted: str) -> bool:
    """Whether the recipe sets a value."""
    section: Any = recipe
    *parents, last = dotted.split(".")
    for name in parents:
        section = section.get(name) if isinstance(section, dict) else getattr(section, name)
        if section is None:
            return False
    return last in section.model_fields_set and getattr(section, last) is not None
