"""A published model as one that draws: a whole pipeline, or adapters and the base they are for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from artifacts.keys import digest_json
from artifacts.models import ModelNotFound, digest_model, resolve_model
from runtimes.adapters.lora import LORA_WEIGHTS
from runtimes.contract import WrongInput
from runtimes.families import detect_family
from runtimes.pipeline_folder.describe import vae_path
from tasks.evaluate.pictures import Painter, digest_pipeline
from tasks.tuned import Tuned


def published_painter(folder: Path) -> Painter:
    """The model in a published folder on this machine.

    Raises:
        ModelNotFound: the base that adapters are for is not there any more.
        WrongInput: there is no model in it.
    """
    if (folder / "model_index.json").is_file():
        return _pipeline_painter(folder)
    lora = folder / LORA_WEIGHTS
    if not lora.is_file():
        raise WrongInput(f"{folder}: neither a pipeline nor adapters ({LORA_WEIGHTS})")
    base, vae = _base_of(folder)
    own = {name: folder / name for name in ("scheduler",) if (folder / name).is_dir()}
    digest = digest_json(
        {
            "pipeline": digest_pipeline(base),
            "vae": None if vae is None else digest_model(vae),
            "tuned": digest_model(folder, (LORA_WEIGHTS, *own)),
        }
    )
    return Painter(digest, base, Tuned(own, lora), vae)


def _pipeline_painter(folder: Path) -> Painter:
    digest = digest_pipeline(folder)
    if not _trained_texts(folder):
        return Painter(digest, folder)
    # Encoders that were trained with it encode the captions of held-out samples too, so its losses
    # are not those by the embeddings in our latents.
    texts = detect_family(folder).clip_encoders
    digest = digest_json({"pipeline": digest, "texts": texts})
    return Painter(digest, folder, Tuned({name: folder / name for name in texts}, None))


def _trained_texts(folder: Path) -> bool:
    """Whether its recipe, if it has one, trained the text encoders."""
    try:
        recipe = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
        return bool(recipe["train"]["train_text_encoder"])
    except (OSError, KeyError, TypeError, yaml.YAMLError):
        return False


def _base_of(folder: Path) -> tuple[Path, Path | None]:
    """The pipeline, and perhaps another VAE, that its recipe says adapters were trained with."""
    path = folder / "recipe.yaml"
    try:
        model: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["model"]
        base = resolve_model(model["path"], revision=model.get("revision"))
        given = model.get("vae")
        vae = None if given is None else vae_path(base, resolve_model(given))
    except (OSError, KeyError, TypeError, yaml.YAMLError) as error:
        raise WrongInput(f"{path} does not say which base its adapters are for: {error}") from None
    except ModelNotFound as error:
        raise ModelNotFound(f"{folder} holds adapters, and their base is gone: {error}") from None
    return base, vae
