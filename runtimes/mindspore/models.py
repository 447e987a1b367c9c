"""Load the parts of a diffusers folder as mindone's models, with nothing left to chance."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mindspore as ms
from mindone.diffusers import AutoencoderKL, UNet2DConditionModel
from mindone.transformers import CLIPTextModel, CLIPTextModelWithProjection
from mindspore import Parameter, Tensor, nn
from mindspore.nn.utils import no_init_parameters
from transformers import CLIPTextConfig

from artifacts.safetensors import Arrays, read_floats
from runtimes.adapters.lora import stored_name
from runtimes.contract import WrongInput
from runtimes.families.unet_inputs import added_weights
from runtimes.pipeline_folder.describe import read_config, text_class
from runtimes.pipeline_folder.weight_files import (
    DENOISER_WEIGHTS,
    TEXT_WEIGHTS,
    check_fit,
    weight_files,
    weight_variant,
)

DENOISER = "UNet2DConditionModel"
_TEXTS = {
    "CLIPTextModel": CLIPTextModel,
    "CLIPTextModelWithProjection": CLIPTextModelWithProjection,
}
#: What MindSpore's own layers, of which mindone's text encoders are made, call their weights.
_STORED = {"embedding_table": "weight", "gamma": "weight", "beta": "bias"}


def load_denoiser(
    folder: Path,
    dtype: ms.Type = ms.float32,
    config: dict[str, Any] | None = None,
    seed: int = 0,
) -> Any:
    """The UNet in `folder`, whatever precision it is stored in.

    Args:
        config: of one that sees more than the folder's (see families/unet_inputs.py).
        seed: of the weights that it gains for that.

    Raises:
        WrongInput: a file is missing or damaged, or the weights are not those of the config.
    """
    path = folder / "config.json"
    config = read_config(path) if config is None else config
    with no_init_parameters():  # no time spent on weights that are replaced at once
        model = _denoiser(path, config)
    _fill(
        model,
        "unet",
        folder,
        DENOISER_WEIGHTS,
        dtype,
        partial(added_weights, config=config, seed=seed),
    )
    return model


def load_text_encoder(
    model_folder: Path,
    part: str,
    dtype: ms.Type = ms.float32,
    folder: Path | None = None,
) -> Any:
    """A CLIP text encoder of a pipeline, of the class that its model_index.json names.

    Args:
        folder: where its weights are, if not in the pipeline's own folder of it.

    Raises:
        WrongInput: its weights are missing or damaged, or not those of its config.
    """
    folder = folder or model_folder / part
    config = CLIPTextConfig(**read_config(folder / "config.json"))
    with no_init_parameters():
        model = _TEXTS[text_class(model_folder, part)](config)
    _fill(model, part, folder, TEXT_WEIGHTS, dtype)
    return model.set_train(False)


def load_vae(folder: Path, dtype: ms.Type = ms.float32, *, flash: bool = True) -> Any:
    """An AutoencoderKL; in float32 if it says that it overflows in half precision.

    Args:
        flash: whether attention in half precision is the device's fused one, where it has one.

    Raises:
        WrongInput: it does not load.
    """
    config = read_config(folder / "config.json")
    upcast = dtype == ms.float16 and config.get("force_upcast", True)
    try:
        vae = AutoencoderKL.from_pretrained(
            str(folder),
            mindspore_dtype=ms.float32 if upcast else dtype,
            variant=weight_variant(folder),
            use_safetensors=True,
            local_files_only=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise WrongInput(f"{folder} does not load: {reason}") from None
    set_flash_attention(vae, flash=flash)
    return vae.set_train(False)


def set_flash_attention(part: Any, *, flash: bool) -> None:
    """Have attention computed by Ascend's fused operator, or as it is written.

    In float32 it is always as written: the operator knows half precision alone, and mindone would
    round to it without a word.
    """
    if hasattr(part, "enable_flash_sdp"):  # mindone's diffusers models
        part.set_flash_attention_force_cast_dtype(None)
        part.enable_flash_sdp(flash)


def random_init_denoiser(base: Path, config: dict[str, Any], seed: int) -> Any:
    """A denoiser that has learnt nothing, as mindone initialises it: by the seed alone, for one
    version of MindSpore.

    Args:
        base: the folder of the base's denoiser.

    Raises:
        WrongInput: it is no denoiser's config.
    """
    ms.set_seed(seed % 2**32)
    return _denoiser(base / "config.json", config)


def _denoiser(path: Path, config: dict[str, Any]) -> Any:
    kind = config.get("_class_name", DENOISER)
    if kind != DENOISER:
        raise WrongInput(f"{path}: runtime mindspore has {DENOISER}, and no {kind}: use torch")
    try:
        return UNet2DConditionModel.from_config(config)
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        raise WrongInput(f"{path}: not a denoiser's config: {error}") from None


def _fill(
    model: nn.Cell,
    part: str,
    folder: Path,
    stem: str,
    dtype: ms.Type,
    more: Callable[[Arrays], Arrays] = lambda arrays: Arrays(),
) -> None:
    """Give a part of the pipeline a folder's weights, and what they lack. Raises WrongInput."""
    files, arrays = weight_files(folder, stem), Arrays()
    for path in files:
        try:
            arrays |= {stored_name(part, n): a for n, a in read_floats(path)[1].items()}
        except (OSError, ValueError, KeyError) as error:
            raise WrongInput(f"{path} cannot be read: {error}") from None
    arrays |= more(arrays)
    parameters = named_weights(model)
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    given = {n: array.shape for n, array in arrays.items() if not n.endswith("position_ids")}
    check_fit(files[0], shapes, given)
    for name, parameter in parameters.items():
        put(parameter, arrays[name], dtype)


def named_weights(model: nn.Cell) -> dict[str, Parameter]:
    """A model's parameters by the names that diffusers and transformers have for them."""
    found = {}
    for name, parameter in model.parameters_and_names():
        owner, _, last = name.rpartition(".")
        found[f"{owner}.{_STORED.get(last, last)}" if owner else name] = parameter
    return found


def put(parameter: Parameter, array: Any, dtype: ms.Type = ms.float32) -> None:
    """Give a parameter a value and a precision."""
    parameter.set_data(Tensor(array).astype(dtype))
