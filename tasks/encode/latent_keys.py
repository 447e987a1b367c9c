"""Content keys of latent shards and of the encode artifact."""

from __future__ import annotations

from typing import Any

from artifacts.records import digest_json
from configs.settings.recipe import Recipe
from tasks.encode.decode_and_crop import TransformSettings

STAGE = "encode"
#: Increment when the content of a latent shard changes.
VERSION = 4


def settings_for_key(recipe: Recipe) -> dict[str, Any]:
    """The settings that affect latents, without devices, processes, `max_bad` and `beam`.

    The batch size is included because it affects rounding.
    """
    excluded = {"device", "processes", "max_bad", "beam"}
    if recipe.encode.text == "embeddings":  # keys are those of releases without the setting
        excluded.add("text")
    settings = recipe.encode.model_dump(mode="json", exclude=excluded)
    transform = TransformSettings.of(recipe).for_key()
    others = ("max_pixels", "scored", "download_reshapes")
    return settings | {name: transform[name] for name in others if name in transform}


def shard_key(
    tar_sha256: str,
    encoders: str,
    dtype: str,
    batch_size: int,
    settings: TransformSettings,
    text: str = "embeddings",
) -> str:
    """Key (sha256 hex) of an image shard's latent shard.

    Args:
        tar_sha256: digest of the image shard.
        encoders: digest of the VAE and the text encoders.
        text: `encode.text`; its default is absent, so that keys are those of releases without it.
    """
    return digest_json(
        {
            "stage": STAGE,
            "version": VERSION,
            "tar": tar_sha256,
            "encoders": encoders,
            "dtype": dtype,
            "batch_size": batch_size,
            "transform": settings.for_key(),
            **({} if text == "embeddings" else {"text": text}),
        }
    )
