"""Check a recipe's training targets against its base's files, before any stage runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from configs.settings.recipe import Recipe
from runtimes.adapters.lora import Adapter, choose_layers, layers_of, to_kohya
from runtimes.contract import WrongInput
from runtimes.families import detect_family
from runtimes.families.family import Family
from runtimes.pipeline_folder.folder import read_part_config, replacement_config, trained_config
from runtimes.pipeline_folder.weights import weight_shapes
from tasks.check_guidance import check_guidance

log = logging.getLogger("kiln")


def check(recipe: Recipe, model: Path) -> None:
    """Raise WrongInput if the base lacks a target layer or cannot become the asked denoiser.

    Args:
        model: pipeline folder of the base.
    """
    settings, family = recipe.train, detect_family(model)
    config = read_part_config(model, family.denoiser)
    if settings.method == "lora":
        _adapted_layers(recipe, model)
    if settings.guidance_scale != 1 and not family.takes_guidance(config):
        raise WrongInput("train.guidance_scale: the base takes no guidance scale: set 1")
    if settings.train_text_encoder and not family.clip:
        raise WrongInput(
            f"train.train_text_encoder: a model of family {family.name} has no CLIP encoder, and "
            "others are not trained: set false"
        )
    if recipe.encode.text == "token_ids" and (encoder := family.frozen_text) is not None:
        raise WrongInput(
            f"encode.text: token_ids lets each step run the text encoders, and {family.name}'s "
            f"{encoder.component} is a language model, which no step runs: set embeddings"
        )
    check_guidance(recipe.evaluate, model, "evaluate.")
    replacement = replacement_config(settings)
    trained_config(config, settings, replacement)
    if replacement is not None:
        _check_makes_denoiser(replacement)


def warn_of_kohya(recipe: Recipe, model: Path) -> None:
    """Warn of adapters without a place in kohya's layout: diffusers' layout has all of them."""
    if recipe.train.method != "lora":
        return
    family, outputs = detect_family(model), _adapted_layers(recipe, model)
    config = read_part_config(model, family.denoiser)
    if why := without_kohya(family, config, outputs, dora=recipe.train.lora.dora):
        log.warning("train.lora: no file in kohya's layout will be published: %s", why)


def _adapted_layers(recipe: Recipe, model: Path) -> dict[str, int]:
    """Layer of the denoiser with an adapter -> number of its outputs. Raises WrongInput."""
    family = detect_family(model)
    shapes = weight_shapes(model / family.denoiser)
    layers, lora = layers_of(shapes), recipe.train.lora
    chosen = choose_layers(family.denoiser, layers, lora, family.attention_layers)
    return {name: shapes[f"{name}.weight"][0] for name in chosen}


def _check_makes_denoiser(config: Mapping[str, Any]) -> None:
    import torch

    from runtimes.torch_models.loading import random_init_denoiser

    with torch.device("meta"):  # without weights
        random_init_denoiser(config, seed=0)


def without_kohya(
    family: Family, config: Mapping[str, Any], outputs: Mapping[str, int], *, dora: bool
) -> str | None:
    """Why adapters of these layers cannot be a file in kohya's layout; None if they can.

    Args:
        config: the denoiser's.
        outputs: layer of the denoiser -> number of its outputs.
    """
    if family.kohya is None:
        return f"it does not support {family.name}"

    def least(out: int) -> Adapter:
        magnitude = np.zeros(out, np.float32) if dora else None
        return Adapter(np.zeros((1, 1), np.float32), np.zeros((out, 1), np.float32), magnitude, 1.0)

    adapters = {family.denoiser: {name: least(out) for name, out in outputs.items()}}
    try:
        to_kohya(adapters, family.kohya, config)
    except ValueError as error:
        return str(error)
    return None
