"""Check a recipe's training targets against its base's files, before any stage runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from configs.settings.recipe import Recipe
from configs.settings.sampling import Sampling
from runtimes.adapters.kohya_format import to_kohya
from runtimes.adapters.lora_target_layers import Layer, choose_layers
from runtimes.adapters.merge_lora import Adapter
from runtimes.contract import WrongInput
from runtimes.families import detect_family
from runtimes.families.family import Family
from runtimes.pipeline_folder.denoiser_config import trained_config
from runtimes.pipeline_folder.describe_encoders import read_config
from tasks.publish.assemble_pipeline import pipeline_weight_files

log = logging.getLogger("kiln")
KINDS: dict[int, Layer] = {2: "linear", 4: "conv"}


def check(recipe: Recipe, model: Path) -> None:
    """Raise WrongInput if the base lacks a target layer or cannot become the asked denoiser.

    Adapters without a place in kohya's layout are a warning: diffusers' layout has all of them.

    Args:
        model: pipeline folder of the base.
    """
    settings, family = recipe.train, detect_family(model)
    denoiser = family.denoiser
    config = read_config(model / denoiser / "config.json")
    if settings.method == "lora":
        shapes = _shapes(model / denoiser)
        layers = {name: KINDS[len(shape)] for name, shape in shapes.items()}
        chosen = choose_layers(denoiser, layers, settings.lora, family.attention_layers)
        outputs = {name: shapes[name][0] for name in chosen}
        if why := without_kohya(family, config, outputs, dora=settings.lora.dora):
            log.warning("train.lora: no file in kohya's layout will be published: %s", why)
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
    _check_sampling(recipe, family, config)
    path = settings.denoiser_config
    replacement = None if path is None else read_config(Path(path))
    trained_config(config, settings, replacement)
    if replacement is not None:
        _check_makes_denoiser(replacement)


def _check_makes_denoiser(config: Mapping[str, Any]) -> None:
    import torch

    from runtimes.torch_models.random_init import random_init_denoiser

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


def _check_sampling(recipe: Recipe, family: Family, config: Mapping[str, Any]) -> None:
    check_true_cfg("evaluate.", recipe.evaluate, family)
    if not family.guidance_input or family.takes_guidance(config):
        return
    if recipe.evaluate.guidance_scale > 1:
        raise WrongInput(
            "evaluate.guidance_scale: the base takes no guidance scale: set 1 "
            "(true_cfg_scale is that of classifier-free guidance)"
        )


def check_true_cfg(prefix: str, settings: Sampling, family: Family) -> None:
    """Raise WrongInput if `true_cfg_scale` has no effect: other families have guidance_scale."""
    if settings.true_cfg_scale != 1 and not family.guidance_input:
        raise WrongInput(
            f"{prefix}true_cfg_scale: it is for flux, not {family.name}: set guidance_scale"
        )


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of linear and convolution layers, told by their rank."""
    from safetensors import safe_open

    found: dict[str, tuple[int, ...]] = {}
    for path in pipeline_weight_files(folder):
        with safe_open(path, framework="np") as stream:
            for name in stream.keys():  # noqa: SIM118 (not a dict)
                shape = tuple(stream.get_slice(name).get_shape())
                if len(shape) in KINDS and name.endswith(".weight"):
                    found[name.removesuffix(".weight")] = shape
    return found
