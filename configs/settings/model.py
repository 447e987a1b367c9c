"""Settings of the section `model`: the base model."""

from __future__ import annotations

from pydantic import Field

from configs.settings.base_section import ModelPlace, Section


class Model(Section):
    """The base model: a diffusers pipeline."""

    path: ModelPlace = Field(
        description="Pipeline folder: hub id, local path or fsspec URL (gs://, s3://)."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id.")
    vae: ModelPlace | None = Field(
        None,
        description="AutoencoderKL to use instead of the pipeline's: hub id, path or fsspec URL.",
    )
