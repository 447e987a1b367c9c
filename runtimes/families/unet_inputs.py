"""What a UNet may see beside its family's conditioning: a mask and what that leaves of a picture
to be seen (inpainting), and how well the picture is liked (an aesthetic score).

Both are told from a denoiser's config, in diffusers' terms: `in_channels` of twice the latents'
channels and one more, and `class_embed_type` timestep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.training import Train
from runtimes.objective.objective import LatentScale
from runtimes.objective.random import Stream, generator

Float32 = NDArray[np.float32]
UNET = "UNet2DConditionModel"
CLASS_LAYERS = ("linear_1", "linear_2")


@dataclass(frozen=True)
class ExtraInputs:
    """What one denoiser sees."""

    inpainting: bool = False
    aesthetic_score: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ExtraInputs:
        """By its config.json."""
        if config.get("_class_name", UNET) != UNET:
            return cls()
        return cls(
            inpainting=config.get("in_channels", 4) == inpainting_channels(config),
            aesthetic_score=config.get("class_embed_type") == "timestep",
        )

    @classmethod
    def from_settings(cls, settings: Train) -> ExtraInputs:
        """What settings ask for."""
        return cls(settings.inpainting, settings.aesthetic_score)


#: What most see.
NO_EXTRA_INPUTS = ExtraInputs()


def added_weights(
    weights: Mapping[str, Float32], config: Mapping[str, Any], seed: int
) -> dict[str, Float32]:
    """The weights that a base lacks to be the denoiser of `config`, such that it predicts what it
    did before whatever it is shown: new input channels, and the last layer of a score, are zeros.

    Args:
        weights: of the base, its first convolution and `time_embedding` among them.
    """
    added: dict[str, Float32] = {}
    if not weights:
        return added
    conv = weights["conv_in.weight"]  # [C', C, 3, 3]
    more = config.get("in_channels", 4) - conv.shape[1]
    if more > 0:
        added["conv_in.weight"] = np.pad(conv, ((0, 0), (0, more), (0, 0), (0, 0)))
    if (
        ExtraInputs.from_config(config).aesthetic_score
        and "class_embedding.linear_1.weight" not in weights
    ):
        for layer in CLASS_LAYERS:  # of the shapes that the time's has
            for kind in ("weight", "bias"):
                like = weights[f"time_embedding.{layer}.{kind}"]
                name = f"class_embedding.{layer}.{kind}"
                added[name] = np.zeros(like.shape, np.float32)
                if (layer, kind) == ("linear_1", "weight"):
                    rng = generator(seed, Stream.SCORE)
                    bound = like.shape[1] ** -0.5  # as PyTorch starts a linear layer
                    added[name] = rng.uniform(-bound, bound, like.shape).astype(np.float32)
    return added


def source_weight_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Weights that `added_weights` is to be given, as far as the base has them."""
    if config.get("_class_name", UNET) != UNET:
        return ()
    return (
        "conv_in.weight",
        *(
            f"{owner}.{layer}.{kind}"
            for owner in ("time_embedding", "class_embedding")
            for layer in CLASS_LAYERS
            for kind in ("weight", "bias")
        ),
    )


def fully_masked(mean: NDArray[Any], vae: Mapping[str, Any]) -> Float32:
    """What an inpainting denoiser sees of pictures that are all hidden [B, 1 + C, h, w]: masks of
    ones above the latents of grey.

    Args:
        mean: of grey pictures, as the VAE gives it [B, C, h, w].
        vae: its config.
    """
    latents = LatentScale.from_info(vae).scaled(np.asarray(mean, np.float32))
    return np.concatenate([np.ones_like(latents[:, :1]), latents], axis=1)


def aesthetic_scores(sampler: Mapping[str, Any]) -> list[float]:
    """The aesthetic score that a picture is drawn with and, before it, what guidance leads away
    from, if there is guidance."""
    names = ("negative_aesthetic_score", "aesthetic_score")
    return [sampler[name] for name in names[sampler["guidance_scale"] <= 1 :]]


def latent_channels(config: Mapping[str, Any]) -> int:
    """Channels of the latents that a denoiser makes."""
    inpainting = ExtraInputs.from_config(config).inpainting
    return int(config["out_channels" if inpainting else "in_channels"])


def inpainting_channels(config: Mapping[str, Any]) -> int:
    """Noisy latents, a mask, and the latents of what it leaves."""
    return 2 * int(config.get("out_channels", 4)) + 1
