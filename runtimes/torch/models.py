"""Load the parts of a diffusers folder that are trained or encode: all there, all of one shape."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers.utils.logging import disable_progress_bar

from runtimes.base import WrongInput
from runtimes.encoders import text_class

#: Classes of diffusers, as a denoiser's config.json names them.
DENOISERS = ("UNet2DConditionModel", "SD3Transformer2DModel")
#: Nothing is fetched and nothing is unpickled.
SAFE = {"local_files_only": True, "use_safetensors": True}
WEIGHTS = "diffusion_pytorch_model"
_PIECE = r"(?:-\d+-of-\d+)?"
VARIANT = re.compile(rf"[^.]+?{_PIECE}(?:\.(?P<variant>[^.]+?){_PIECE})?\.safetensors")


def load_denoiser(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The denoiser in `folder` on the CPU, whatever precision it is stored in.

    Raises:
        WrongInput: a file is missing or damaged, or the weights are not those of the config.
    """
    config = _read_json(folder / "config.json")
    kind = config.get("_class_name", DENOISERS[0])
    if kind not in DENOISERS:
        raise WrongInput(
            f"{folder / 'config.json'}: a denoiser of class {kind} is not known here (known: "
            f"{', '.join(DENOISERS)})"
        )
    try:
        with torch.device("meta"):  # no time spent on weights that are replaced at once
            denoiser = getattr(diffusers, kind).from_config(config)
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        raise WrongInput(f"{folder / 'config.json'}: not a denoiser's config: {error}") from None
    files = _weight_files(folder)
    weights: dict[str, torch.Tensor] = {}
    for path in files:
        weights |= _read_weights(path, dtype)
    _check_fit(files[0], denoiser.state_dict(), weights)
    denoiser.load_state_dict(weights, assign=True)
    return denoiser


def load_text_encoder(
    model_folder: Path,
    part: str,
    dtype: torch.dtype = torch.float32,
    folder: Path | None = None,
) -> Any:
    """A text encoder of a pipeline on the CPU, of the class that its model_index.json names.

    Args:
        folder: where its weights are, if not in the pipeline's own folder of it.

    Raises:
        WrongInput: its weights are missing or damaged, or not those of its config.
    """
    folder = folder or model_folder / part
    kind = getattr(transformers, text_class(model_folder, part))
    disable_progress_bar()  # loading is announced by the stage, not by transformers
    try:
        model, loaded = kind.from_pretrained(
            folder,
            torch_dtype=dtype,
            variant=weight_variant(folder),
            output_loading_info=True,
            **SAFE,
        )
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise WrongInput(f"{folder} does not load: {reason}") from None
    if missing := sorted(loaded["missing_keys"]):
        raise WrongInput(f"{folder} lacks {len(missing)} weights, such as {missing[0]}")
    return model.eval()


def weight_variant(folder: Path) -> str | None:
    """The variant that must be asked for to load a part of a pipeline from `folder`.

    None, unless there are weights of variants only: `model.fp16.safetensors`, or in pieces
    `model.fp16-00001-of-00002.safetensors` (older: `model-00001-of-00002.fp16.safetensors`).
    """
    found = [VARIANT.fullmatch(path.name) for path in folder.glob("*.safetensors")]
    variants = {match["variant"] for match in found if match}
    return None if None in variants else min(variants, default=None)


def _names(variant: str) -> tuple[str, str]:
    whole = f"{WEIGHTS}{variant}.safetensors"
    return whole, f"{WEIGHTS}.safetensors.index{variant}.json"


def _weight_files(folder: Path) -> list[Path]:
    for variant in ("", ".fp16"):
        whole, index = (folder / name for name in _names(variant))
        if whole.exists():
            return [whole]
        if index.exists():
            names = sorted(set(_read_json(index)["weight_map"].values()))
            return [folder / name for name in names]
    raise WrongInput(f"{folder / _names('')[0]} is missing: the denoiser's weights are needed")


def _read_weights(path: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as stream:
            return {name: stream.get_tensor(name).to(dtype) for name in stream.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise WrongInput(f"{path} cannot be read: {error}") from None


def _check_fit(path: Path, wanted: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> None:
    for what, names in (
        ("lacks", wanted.keys() - given.keys()),
        ("has, and its config knows nothing of,", given.keys() - wanted.keys()),
    ):
        if names:
            raise WrongInput(f"{path} {what} {len(names)} weights, such as {min(names)}")
    for name, tensor in wanted.items():
        if given[name].shape != tensor.shape:
            here, there = tuple(given[name].shape), tuple(tensor.shape)
            raise WrongInput(f"{path}: {name} has shape {here}, its config says {there}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise WrongInput(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise WrongInput(f"{path} cannot be read: {error}") from None
