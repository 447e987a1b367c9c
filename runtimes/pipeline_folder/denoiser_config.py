"""The config of the trained denoiser: the base's or a replacement, plus extra inputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.settings.train import Train
from runtimes.contract import WrongInput
from runtimes.families.inpainting_and_scores import (
    UNET,
    ExtraInputs,
    inpainting_channels,
    latent_channels,
)
from runtimes.pipeline_folder.read_configs import read_config, read_denoiser_config
from runtimes.process.job import HasNetwork

#: Keys in which a replacement must equal the base's config: the interface to VAE and text encoders,
#: and the default image size.
_SHARED = (
    "_class_name",
    "in_channels",
    "out_channels",
    "cross_attention_dim",
    "joint_attention_dim",
    "pooled_projection_dim",
    "addition_embed_type",
    "class_embed_type",
    "encoder_hid_dim_type",
    "num_class_embeds",
    "addition_time_embed_dim",
    "projection_class_embeddings_input_dim",
    "sample_size",
    "guidance_embeds",
    "cap_feat_dim",
)


def folder_extras(folder: Path) -> ExtraInputs:
    """The extra inputs of the denoiser in a folder. Raises WrongInput."""
    return ExtraInputs.from_config(read_config(folder / "config.json"))


def replacement_config(settings: Train) -> dict[str, Any] | None:
    """The config that replaces the base's denoiser's; None if none does. Raises WrongInput."""
    path = settings.denoiser_config
    return None if path is None else read_config(Path(path))


def trained_config(
    base: Mapping[str, Any], settings: Train, instead: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The config of the trained denoiser, with the extra inputs of the settings.

    Args:
        base: config of the base's denoiser.
        instead: config of a randomly initialised denoiser that replaces the base's.

    Raises:
        WrongInput: the extra inputs of config and settings contradict each other, the denoiser's
            class does not support them, or `instead` does not fit the base's pipeline.
    """
    if instead is not None:
        _check_fits(_without_extras(instead), _without_extras(base))
    config = dict(base if instead is None else instead)
    has = ExtraInputs.from_config(config)
    asked = ExtraInputs.from_settings(settings)
    for name in ("inpainting", "aesthetic_score"):
        if getattr(has, name) and not getattr(asked, name):
            raise WrongInput(f"the base's denoiser has this input: set train.{name}: true")
        if getattr(asked, name) and config.get("_class_name", UNET) != UNET:
            raise WrongInput(f"train.{name} is for UNets, the base's is {config['_class_name']}")
        if getattr(asked, name) and not getattr(has, name) and settings.method == "lora":
            raise WrongInput(
                f"train.{name}: the base lacks the weights, and adapters cannot add them: set "
                "train.method: full, or choose a base that has them"
            )
    if asked.inpainting:
        config["in_channels"] = inpainting_channels(config)
    if asked.aesthetic_score:
        own = config.get("class_embed_type") not in (None, "timestep")
        if own or config.get("num_class_embeds") is not None:
            raise WrongInput("train.aesthetic_score: the base has classes of its own")
        config["class_embed_type"] = "timestep"
    return config


def job_config(job: HasNetwork, settings: Train) -> dict[str, Any]:
    """The config of the denoiser that a job or request trains. Raises WrongInput."""
    return trained_config(read_denoiser_config(job.model_folder), settings, job.denoiser_config)


def _without_extras(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without its extra inputs."""
    extras, plain = ExtraInputs.from_config(config), dict(config)
    if extras.inpainting:
        plain["in_channels"] = latent_channels(config)
    if extras.aesthetic_score:
        plain["class_embed_type"] = None
    return plain


def _check_fits(config: Mapping[str, Any], base: Mapping[str, Any]) -> None:
    """Raise WrongInput if a replacement's config does not fit the base's pipeline."""
    for name in _SHARED:
        given, wanted = config.get(name), base.get(name)
        if (given or None) != (wanted or None):  # diffusers leaves out some settings that are false
            actual = "is missing" if name not in config else f"is {given}"
            raise WrongInput(f"train.denoiser_config: {name} {actual}, the base's is {wanted}")
