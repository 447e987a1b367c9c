"""What a pipeline folder's encoders are: read from its configs and fingerprinted, not loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from artifacts.keys import digest_json
from artifacts.models import digest_model
from runtimes.base import WrongInput
from runtimes.families import detect_family

TEXT_PARTS = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")


def describe_encoders(model_folder: Path, vae_folder: Path | None = None) -> dict[str, Any]:
    """The content of `latents.json` (see DESIGN section 4), from config files alone.

    Args:
        model_folder: a diffusers pipeline folder of Stable Diffusion 1, 2 or XL.
        vae_folder: an AutoencoderKL in place of the pipeline's own.

    Raises:
        WrongInput: a config is missing, or the pipeline is of another family.
    """
    index = read_config(model_folder / "model_index.json")
    vae = read_config(vae_path(model_folder, vae_folder) / "config.json")
    family = detect_family(model_folder).name
    _check_text_encoders(model_folder, index)
    first = read_config(model_folder / "text_encoder" / "config.json")
    path = model_folder / "text_encoder_2" / "config.json"
    second = read_config(path) if family == "sdxl" else None
    zeros = second is not None and index.get("force_zeros_for_empty_prompt", True)
    return {
        "family": family,
        "latent_channels": vae["latent_channels"],
        "vae_scale_factor": 2 ** (len(vae["block_out_channels"]) - 1),
        "scaling_factor": vae.get("scaling_factor", 0.18215),
        "shift_factor": vae.get("shift_factor") or 0.0,
        "latents_mean": vae.get("latents_mean"),
        "latents_std": vae.get("latents_std"),
        "empty_prompt": "zeros" if zeros else "encoded",
        "tokens": first["max_position_embeddings"],
        "prompt_dim": first["hidden_size"] + (second["hidden_size"] if second else 0),
        "pooled_dim": second["projection_dim"] if second else None,
    }


def digest_encoders(model_folder: Path, vae_folder: Path | None = None) -> str:
    """sha256 over everything of a pipeline that changes what it encodes to; never its UNet."""
    parts = (*TEXT_PARTS, "vae") if vae_folder is None else TEXT_PARTS
    index = read_config(model_folder / "model_index.json")
    facts = {name: index.get(name) for name in (*TEXT_PARTS, "force_zeros_for_empty_prompt")}
    vae = None if vae_folder is None else digest_model(vae_path(model_folder, vae_folder))
    return digest_json({"parts": digest_model(model_folder, parts), "vae": vae, "index": facts})


def vae_path(model_folder: Path, vae_folder: Path | None) -> Path:
    """The folder with the VAE's config.json: a pipeline folder may stand in for its `vae/`."""
    folder = model_folder if vae_folder is None else vae_folder
    is_vae = vae_folder is not None and (folder / "config.json").is_file()
    return folder if is_vae else folder / "vae"


def read_config(path: Path) -> dict[str, Any]:
    """A model's config; WrongInput when it is missing or no JSON object."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise WrongInput(
            f"{path}: not there; a diffusers pipeline folder (or, for a VAE, an AutoencoderKL "
            "folder) was expected"
        ) from None
    except ValueError:
        raise WrongInput(f"{path}: not valid JSON") from None
    if not isinstance(config, dict):
        raise WrongInput(f"{path}: not a model's config")
    return config


def _check_text_encoders(model_folder: Path, index: dict[str, Any]) -> None:
    classes = {(index.get(part) or [None, None])[1] for part in TEXT_PARTS[:2]}
    if not classes <= {"CLIPTextModel", "CLIPTextModelWithProjection", None}:
        found = ", ".join(sorted(filter(None, classes)))
        raise WrongInput(f"{model_folder}: its text encoders ({found}) are not all CLIP's")
