"""Extra inputs of a UNet: an inpainting mask with masked latents, and an aesthetic score.

A denoiser's config.json declares both in diffusers' terms: inpainting by `in_channels` = 2 C + 1
for C latent channels, the score by `class_embed_type` = timestep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artifacts.latent_shards import LatentScale
from configs.errors import Refused
from configs.settings.train import Train
from runtimes.objective.random_draws import Stream, generator

Float32 = NDArray[np.float32]
UNET = "UNet2DConditionModel"
CLASS_LAYERS = ("linear_1", "linear_2")


@dataclass(frozen=True)
class ExtraInputs:
    """The extra inputs of a denoiser."""

    inpainting: bool = False
    aesthetic_score: bool = False
    control: bool = False  # of a ControlNet beside it: the denoiser itself has none

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ExtraInputs:
        """The extra inputs that a denoiser's config declares."""
        if config.get("_class_name", UNET) != UNET:
            return cls()
        return cls(
            inpainting=config.get("in_channels", 4) == inpainting_channels(config),
            aesthetic_score=config.get("class_embed_type") == "timestep",
        )

    @classmethod
    def from_settings(cls, settings: Train) -> ExtraInputs:
        """The extra inputs that train settings request."""
        return cls(settings.inpainting, settings.aesthetic_score)

    @property
    def facts(self) -> dict[str, bool]:
        """The denoiser's own inputs by name, for keys."""
        return {name: value for name, value in vars(self).items() if name != "control"}


NO_EXTRA_INPUTS = ExtraInputs()


def added_weights(
    weights: Mapping[str, Float32], config: Mapping[str, Any], seed: int
) -> dict[str, Float32]:
    """Initial values of the weights that the extra inputs of `config` need and a base lacks.

    The new input channels and the score embedding's last layer are zero, so that the predictions
    before training equal the base's.

    Args:
        weights: the base's weights, at least those in `source_weight_names`.
        config: config of the denoiser with its extra inputs.
        seed: seed of the score embedding's first layer.

    Returns:
        name -> f32 array; `conv_in.weight` [C_out, in_channels, 3, 3] replaces the base's.
    """
    added: dict[str, Float32] = {}
    if "conv_in.weight" not in weights:
        return added  # the base's check names what it lacks
    conv = weights["conv_in.weight"]  # [C', C, 3, 3]
    more = config.get("in_channels", 4) - conv.shape[1]
    if more > 0:
        added["conv_in.weight"] = np.pad(conv, ((0, 0), (0, more), (0, 0), (0, 0)))
    scored = ExtraInputs.from_config(config).aesthetic_score
    if scored and "class_embedding.linear_1.weight" not in weights:
        for layer in CLASS_LAYERS:  # the shapes equal those of time_embedding
            for kind in ("weight", "bias"):
                like = weights[f"time_embedding.{layer}.{kind}"]
                name = f"class_embedding.{layer}.{kind}"
                added[name] = np.zeros(like.shape, np.float32)
                if (layer, kind) == ("linear_1", "weight"):
                    rng = generator(seed, Stream.SCORE)
                    bound = like.shape[1] ** -0.5  # PyTorch's initialisation of a linear layer
                    added[name] = rng.uniform(-bound, bound, like.shape).astype(np.float32)
    return added


def source_weight_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the base's weights that `added_weights` reads."""
    if config.get("_class_name", UNET) != UNET:
        return ()
    owners = ("time_embedding", "class_embedding")
    names = product(owners, CLASS_LAYERS, ("weight", "bias"))
    return ("conv_in.weight", *map(".".join, names))


def fully_masked(mean: NDArray[Any], vae: Mapping[str, Any]) -> Float32:
    """The inpainting input [B, 1 + C, h, w] f32 for a fully masked image.

    It concatenates a mask of ones and the latents of a grey image.

    Args:
        mean: the VAE's posterior mean of grey images [B, C, h, w].
        vae: the VAE's config.
    """
    latents = LatentScale.from_info(vae).scaled(np.asarray(mean, np.float32))
    return np.concatenate([np.ones_like(latents[:, :1]), latents], axis=1)


def aesthetic_scores(sampler: Mapping[str, Any]) -> list[float]:
    """Scores for the denoiser's batch: [negative, positive] with guidance, else [positive]."""
    names = ("negative_aesthetic_score", "aesthetic_score")
    return [sampler[name] for name in (names if sampler["guidance_scale"] > 1 else names[1:])]


def latent_channels(config: Mapping[str, Any]) -> int:
    """Number of latent channels C that a UNet predicts."""
    inpainting = ExtraInputs.from_config(config).inpainting
    return _channels(config, "out_channels" if inpainting else "in_channels")


def inpainting_channels(config: Mapping[str, Any]) -> int:
    """`in_channels` of an inpainting UNet: noisy latents, mask, latents of the masked image."""
    return 2 * _channels(config, "out_channels") + 1


def _channels(config: Mapping[str, Any], name: str) -> int:
    channels = config.get(name, 4)  # diffusers' default
    if type(channels) is not int or channels < 1:
        raise Refused(f"the UNet's {name} is {channels!r}, not a number of channels")
    return channels
