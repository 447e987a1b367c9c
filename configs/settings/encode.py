"""Settings of the section `encode`: crops, buckets, masks and the held-out split."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt

from configs.settings.base_section import Dtype, Fraction, Section


class Encode(Section):
    """Encode image shards into latent shards: VAE moments and text embeddings."""

    resolution: PositiveInt = Field(
        1024, description="Side of the square pictures, in pixels; buckets have about its area."
    )
    aspect_buckets: bool = Field(
        False, description="Bucket pictures by aspect ratio; false crops all to squares."
    )
    bucket_step: PositiveInt = Field(64, description="Step of the bucket sides, in pixels.")
    max_aspect: float = Field(
        2.0, ge=1.0, description="Maximum ratio of a bucket's longer side to its shorter one."
    )
    crop: Literal["center", "random"] = Field("center", description="Position of the crop.")
    flip: bool = Field(
        False,
        description="Mirror each training sample left-right with probability 0.5; the store holds "
        "the latents of both variants.",
    )
    masks: int = Field(
        0,
        ge=0,
        description="Inpainting masks per picture, for train.inpainting; the store holds the "
        "latents of each masked picture.",
    )
    seed: int = Field(
        0, ge=0, description="Seed of the crops and masks, combined with each picture's sha256."
    )
    holdout: float = Field(
        0.05,
        ge=0.0,
        lt=1.0,
        description="Fraction of the pictures, 0 to below 1, in the held-out split. The sha256 of "
        "the downloaded bytes selects them.",
    )
    batch_size: PositiveInt = Field(
        8, description="Pictures per forward pass of the VAE; part of the cache key."
    )
    max_bad: Fraction = Field(
        0.05, description="Maximum fraction of undecodable or NaN samples, 0 to 1."
    )
    device: str = Field(
        "auto", description="Device: see train.device; without a number, all devices of its kind."
    )
    processes: PositiveInt | None = Field(
        None,
        description="Encoder processes per machine; null: one per accelerator, one on a CPU.",
    )
    dtype: Dtype = Field("float32", description="Compute precision of the encoders.")
    text: Literal["embeddings", "token_ids"] = Field(
        "embeddings",
        description="What the store holds of a caption. With token_ids, each training step runs "
        "the text encoders; families sd and sdxl.",
    )
    beam: dict[str, Any] = Field(
        default_factory=dict,
        description="Beam pipeline options of this stage, over those of section `beam`.",
    )

    @property
    def text_dtype(self) -> str | None:
        """Dtype of the text encoders that each step runs; None: the store holds embeddings."""
        return self.dtype if self.text == "token_ids" else None
