"""Load a published model for sampling: a full pipeline, or adapters and their base.

A version of a registry has a manifest: its files are compared with it before they are loaded.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from fsspec.implementations.local import LocalFileSystem

from artifacts.models import (
    IGNORED,
    ModelAway,
    ModelNotFound,
    cache_folder,
    digest_model,
    digest_model_file,
    resolve_model,
)
from artifacts.records import Damaged, digest_json, distrust, read_record
from artifacts.store import MANIFEST
from runtimes.adapters.lora import LORA_WEIGHTS
from runtimes.contract import WrongInput
from runtimes.families import detect_family
from runtimes.pipeline_folder.folder import vae_path
from tasks.evaluate.draw_pictures import EvalModel, digest_eval_model, digest_pipeline
from tasks.result_files import RECIPE
from tasks.trained_weights import TrainedWeights


def load_published_model(folder: Path) -> EvalModel:
    """The model in a local folder that the publish stage wrote.

    Raises:
        Damaged: a file is not the one that its manifest names; a folder without one is not checked.
        ModelNotFound, ModelAway: the base of the adapters is missing, or does not answer now.
        WrongInput: the folder has neither a pipeline nor adapters.
    """
    _check_files(folder)
    found = find_parts(folder)
    return replace(found, digest=_digest(folder, found))


def find_parts(folder: Path) -> EvalModel:
    """As `load_published_model`, without reading the weights: the digest is empty."""
    evaluated = _section(folder, "evaluate")
    if (folder / "model_index.json").is_file():
        weights = TrainedWeights(_trained_texts(folder), None)
        return EvalModel("", folder, weights, evaluated=evaluated)
    lora = folder / LORA_WEIGHTS
    if not lora.is_file():
        raise WrongInput(f"{folder}: neither a pipeline nor adapters ({LORA_WEIGHTS})")
    base, vae = _base_of(folder)
    own = {name: folder / name for name in ("scheduler",) if (folder / name).is_dir()}
    return EvalModel("", base, TrainedWeights(own, lora), vae, evaluated)


def is_complete_here(folder: Path) -> bool:
    """Whether nothing must be fetched: adapters need their base, which may be on the hub."""
    if (folder / "model_index.json").is_file():
        return True
    model = _base_settings(folder)
    named = [model.get("path"), model.get("vae")]
    return all(os.path.isdir(place) for place in named if isinstance(place, str))


def _check_files(folder: Path) -> None:
    try:
        manifest = read_record(LocalFileSystem(), str(folder / MANIFEST))
    except Damaged:
        if (folder / RECIPE).is_file():
            raise _damaged(folder, MANIFEST) from None
        return  # some other program's file of this name
    for entry in manifest["files"] if manifest else []:
        path = folder / entry.path
        if path.name in IGNORED:  # such as a card that was edited
            continue
        if not path.is_file() or digest_model_file(path) != entry.sha256:
            distrust(LocalFileSystem(), str(path))
            raise _damaged(folder, entry.path)


def _damaged(folder: Path, path: str) -> Damaged:
    copied = folder.is_relative_to(cache_folder())
    first = f"delete this copy of the model ({folder}) and run again; or " if copied else ""
    return Damaged(
        f"{folder / path} is missing or damaged, its sha256 is not that of the manifest: {first}"
        "`kiln verify` lists what is damaged, `kiln run` of its recipe writes it again, and `kiln "
        "rollback` restores the champion before it"
    )


def _digest(folder: Path, found: EvalModel) -> str:
    if found.weights.lora is not None:
        own = digest_model(folder, (LORA_WEIGHTS, *found.weights.parts))
        return digest_eval_model(found.folder, found.vae, own)
    pipeline, texts = digest_pipeline(folder), tuple(found.weights.parts)
    return digest_json({"pipeline": pipeline, "texts": texts}) if texts else pipeline


def _trained_texts(folder: Path) -> dict[str, Path]:
    """The text encoders of a published pipeline that were trained.

    They also encode the held-out captions, so the loss differs from that with the embeddings stored
    in the latents. The digest must differ too.
    """
    if not _section(folder, "train").get("train_text_encoder"):
        return {}
    return {name: folder / name for name in detect_family(folder).clip_encoders}


def _section(folder: Path, name: str) -> dict[str, Any]:
    """A section of a published folder's recipe; empty without one."""
    try:
        recipe = yaml.safe_load((folder / RECIPE).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    found = recipe.get(name) if isinstance(recipe, dict) else None
    return found if isinstance(found, dict) else {}


def _base_settings(folder: Path) -> dict[str, Any]:
    """`model` of the recipe of adapters: of the manifest, which is never pushed and has paths."""
    with suppress(OSError, ValueError, KeyError, TypeError):  # none, or another program's
        record = read_record(LocalFileSystem(), str(folder / MANIFEST)) or {}
        return dict(record["settings"]["base"])
    return _section(folder, "model")


def _base_of(folder: Path) -> tuple[Path, Path | None]:
    """The pipeline folder and the separate VAE, if any, of the recipe of a folder's adapters."""
    try:
        model = _base_settings(folder)
        # A number names a descriptor to the operating system, and no file to us: fspath refuses it.
        base = resolve_model(os.fspath(model["path"]), revision=model.get("revision"))
        given = model.get("vae")
        return base, None if given is None else vae_path(base, resolve_model(os.fspath(given)))
    except (KeyError, TypeError):
        raise WrongInput(f"{folder}/{RECIPE} does not name the base of its adapters") from None
    except (ModelNotFound, ModelAway) as error:
        raise type(error)(f"{folder}: the base of its adapters is missing: {error}") from None
