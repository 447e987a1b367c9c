"""What a latent shard, and the artifact made of such shards, depend on."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from artifacts.keys import digest_json
from configs.schema import Recipe
from tasks.encode.transform import TransformSettings

STAGE = "encode"
#: Raised when the meaning of a latent shard changes.
VERSION = 3


def settings_for_key(recipe: Recipe) -> dict[str, Any]:
    """The settings that change latents: not the device, or what is tolerated.

    The batch size is among them: the last bits of a latent depend on it.
    """
    settings = recipe.encode.model_dump(mode="json", exclude={"device", "max_bad"})
    scored = TransformSettings.of(recipe).scored
    return {**settings, "max_pixels": recipe.download.max_pixels, "scored": scored}


def shard_key(
    tar_sha256: str, encoders: str, dtype: str, batch_size: int, settings: TransformSettings
) -> str:
    """The key of the latent shard of an image shard: its bytes, the encoders, the transform."""
    return digest_json(
        {
            "stage": STAGE,
            "version": VERSION,
            "tar": tar_sha256,
            "encoders": encoders,
            "dtype": dtype,
            "batch_size": batch_size,
            "transform": asdict(settings),
        }
    )
