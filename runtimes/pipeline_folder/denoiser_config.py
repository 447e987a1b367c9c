"""The config of the denoiser that a job trains: the base's, a fresh one's, with added inputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.training import Train
from runtimes.contract import WrongInput
from runtimes.families import detect_family
from runtimes.families.unet_inputs import UNET, ExtraInputs, inpainting_channels, latent_channels
from runtimes.pipeline_folder.describe import read_config
from runtimes.process.job import TrainJob

#: Keys in which a fresh denoiser must equal the base's: what its VAE and text encoders ask of any
#: denoiser, and the size of pictures where none is asked for.
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
)


def folder_extras(folder: Path) -> ExtraInputs:
    """What a denoiser sees beside its family's conditioning, by its folder. Raises WrongInput."""
    return ExtraInputs.from_config(read_config(folder / "config.json"))


def trained_config(
    base: Mapping[str, Any], settings: Train, instead: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The config of the denoiser that settings train: the base's, or the one that a fresh denoiser
    is given `instead`, with what it is to see.

    Raises:
        WrongInput: it cannot see that, or must and is not asked to; or it does not fit the base.
    """
    if instead is not None:
        _check_fits(_plain(instead), _plain(base))
    config = dict(base if instead is None else instead)
    has = ExtraInputs.from_config(config)
    asked = ExtraInputs.from_settings(settings)
    for name in ("inpainting", "aesthetic_score"):
        if getattr(has, name) and not getattr(asked, name):
            raise WrongInput(f"the base is made for it: set train.{name}: true")
        if getattr(asked, name) and config.get("_class_name", UNET) != UNET:
            raise WrongInput(f"train.{name} is for UNets, the base's is {config['_class_name']}")
        if getattr(asked, name) and not getattr(has, name) and settings.method == "lora":
            raise WrongInput(
                f"train.{name}: the base lacks the weights, and adapters cannot add them: take "
                "method: full, or a base that has them"
            )
    if asked.inpainting:
        config["in_channels"] = inpainting_channels(config)
    if asked.aesthetic_score:
        own = config.get("class_embed_type") not in (None, "timestep")
        if own or config.get("num_class_embeds") is not None:
            raise WrongInput("train.aesthetic_score: the base has classes of its own")
        config["class_embed_type"] = "timestep"
    return config


def job_config(job: TrainJob, settings: Train) -> dict[str, Any]:
    """`trained_config` of a job. Raises WrongInput."""
    folder = Path(job.model)
    base = read_config(folder / detect_family(folder).denoiser / "config.json")
    return trained_config(base, settings, job.denoiser_config)


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config less what it sees beside its family's conditioning."""
    extras, plain = ExtraInputs.from_config(config), dict(config)
    if extras.inpainting:
        plain["in_channels"] = latent_channels(config)
    if extras.aesthetic_score:
        plain["class_embed_type"] = None
    return plain


def _check_fits(config: Mapping[str, Any], base: Mapping[str, Any]) -> None:
    """Raise WrongInput if a denoiser could not take the place of the base's, by their configs."""
    for name in _SHARED:
        given, wanted = config.get(name), base.get(name)
        if given != wanted:
            said = "is missing" if name not in config else f"is {given}"
            raise WrongInput(f"train.denoiser_config: {name} {said}, the base's is {wanted}")
