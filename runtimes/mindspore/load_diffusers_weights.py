"""Load components of a diffusers pipeline folder as mindone models, with checked weights."""

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
from configs.errors import Refused
from configs.secrets import one_line
from runtimes.adapters.lora import stored_name
from runtimes.families.inpainting_aesthetics import added_weights
from runtimes.pipeline_folder import weights
from runtimes.pipeline_folder.folder import Base, read_config, vae_overflows

DENOISER = "UNet2DConditionModel"
_TEXTS = {
    "CLIPTextModel": CLIPTextModel,
    "CLIPTextModelWithProjection": CLIPTextModelWithProjection,
}
#: Weight names of MindSpore's layers, which mindone's text encoders use, to PyTorch's names.
_STORED = {"embedding_table": "weight", "gamma": "weight", "beta": "bias"}


def load_denoiser(
    folder: Path, dtype: ms.Type = ms.float32, config: dict[str, Any] | None = None, seed: int = 0
) -> Any:
    """Load a UNet and cast its weights to `dtype`.

    Args:
        folder: the UNet's folder in the pipeline.
        dtype: dtype of the weights, whatever their stored precision is.
        config: config of a UNet with extra inputs (inpainting_aesthetics.py); None is the folder's.
        seed: initializes the weights of the extra inputs.

    Raises:
        Refused: a file is missing or damaged, or the weights do not match the config.
    """
    path = folder / "config.json"
    config = read_config(path) if config is None else config
    with no_init_parameters():  # skips the random initialization of weights
        model = _denoiser(path, config)
    added = partial(added_weights, config=config, seed=seed)
    _fill(model, "unet", folder, weights.DENOISER_WEIGHTS, dtype, added)
    return model


def load_text_encoder(
    base: Base, part: str, dtype: ms.Type = ms.float32, folder: Path | None = None
) -> Any:
    """Load a CLIP text encoder, in evaluation mode.

    Args:
        base: the pipeline; its model_index.json names the encoder's class.
        part: component name, such as `text_encoder_2`.
        dtype: dtype of the weights.
        folder: folder of trained weights; None is the pipeline's own folder.

    Raises:
        Refused: weights are missing or damaged, or do not match their config.
    """
    folder = folder or base.part(part)
    with no_init_parameters():
        model = _TEXTS[base.text_class(part)](text_config(folder))
    _fill(model, part, folder, weights.TEXT_WEIGHTS, dtype)
    return model.set_train(False)


def text_config(folder: Path) -> Any:
    """The config of a CLIP text encoder. Raises Refused if it is missing."""
    return CLIPTextConfig(**read_config(folder / "config.json"))


def load_vae(folder: Path, dtype: ms.Type = ms.float32, *, flash: bool = True) -> Any:
    """Load an AutoencoderKL, in float32 if its config has `force_upcast` and `dtype` is float16.

    Args:
        folder: folder of the VAE.
        dtype: dtype of the weights.
        flash: whether to use the device's fused attention in half precision.

    Raises:
        Refused: the VAE cannot be loaded.
    """
    upcast = vae_overflows(read_config(folder / "config.json"), float16=dtype == ms.float16)
    try:
        vae = AutoencoderKL.from_pretrained(
            str(folder),
            mindspore_dtype=ms.float32 if upcast else dtype,
            variant=weights.weight_variant(folder),
            use_safetensors=True,
            local_files_only=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise Refused(f"{folder} does not load: {one_line(error)}") from None
    set_flash_attention(vae, flash=flash)
    return vae.set_train(False)


def set_flash_attention(part: Any, *, flash: bool) -> None:
    """Select Ascend's fused attention operator, or mindone's unfused attention.

    float32 always uses unfused attention. The fused operator supports half precision only, and
    mindone would silently cast float32 to float16.
    """
    if hasattr(part, "enable_flash_sdp"):  # mindone's diffusers models
        part.set_flash_attention_force_cast_dtype(None)
        part.enable_flash_sdp(flash)


def random_init_denoiser(base: Path, config: dict[str, Any], seed: int) -> Any:
    """Construct a UNet with mindone's random initialization.

    With the same version of MindSpore, the weights depend on the seed alone.

    Args:
        base: folder of the base pipeline's denoiser, for messages.
        config: diffusers config of the UNet.
        seed: seed of the initialization.

    Raises:
        Refused: the config does not describe a UNet.
    """
    ms.set_seed(seed % 2**32)
    return _denoiser(base / "config.json", config)


def _denoiser(path: Path, config: dict[str, Any]) -> Any:
    kind = config.get("_class_name", DENOISER)
    if kind != DENOISER:
        raise Refused(f"{path}: runtime mindspore has {DENOISER}, and no {kind}: use torch")
    try:
        return UNet2DConditionModel.from_config(config)
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        raise Refused(f"{path}: not a denoiser's config: {error}") from None


def _fill(
    model: nn.Cell,
    part: str,
    folder: Path,
    stem: str,
    dtype: ms.Type,
    more: Callable[[Arrays], Arrays] = lambda arrays: Arrays(),
) -> None:
    """Load a folder's weights into a component.

    Args:
        model: the component, changed in place.
        part: component name.
        folder: folder of the weight files.
        stem: file name of the weights without variant and extension.
        dtype: dtype of the parameters.
        more: returns additional weights, computed from the weights of the folder.

    Raises:
        Refused: a file is missing or damaged, or the weights do not match the model.
    """
    files = weights.weight_files(folder, stem)
    arrays = Arrays()
    for path in files:
        try:
            arrays |= {stored_name(part, n): a for n, a in read_floats(path)[1].items()}
        except (OSError, ValueError, KeyError) as error:
            raise Refused(f"{path} cannot be read: {error}") from None
    arrays |= more(arrays)
    parameters = named_weights(model)
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    stored = {n: a.shape for n, a in arrays.items() if not n.endswith("position_ids")}
    weights.check_fit(files[0], shapes, stored)
    for name, parameter in parameters.items():
        set_parameter(parameter, arrays[name], dtype)


def named_weights(model: nn.Cell) -> dict[str, Parameter]:
    """A model's parameters by their names in diffusers and transformers."""
    parameters = {}
    for name, parameter in model.parameters_and_names():
        owner, _, last = name.rpartition(".")
        parameters[f"{owner}.{_STORED.get(last, last)}" if owner else name] = parameter
    return parameters


def set_parameter(parameter: Parameter, array: Any, dtype: ms.Type = ms.float32) -> None:
    """Set the value and dtype of a parameter."""
    parameter.set_data(Tensor(array).astype(dtype))
