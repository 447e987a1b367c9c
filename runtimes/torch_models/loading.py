"""Load the denoiser and text encoders of a diffusers pipeline folder, with checked weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers.utils.logging import disable_progress_bar

from configs.redact_errors_and_logs import one_line
from runtimes.contract import WrongInput
from runtimes.families import denoiser_classes
from runtimes.families.unet_inputs import added_weights, source_weight_names
from runtimes.pipeline_folder.describe_encoders import read_config, text_class
from runtimes.pipeline_folder.weight_files import check_fit, weight_files, weight_variant

#: Options of `from_pretrained` that forbid downloads and pickle files.
SAFE = {"local_files_only": True, "use_safetensors": True}


def load_denoiser(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    config: dict[str, Any] | None = None,
    seed: int = 0,
) -> Any:
    """Load a denoiser to the CPU and cast its weights to `dtype`.

    Args:
        folder: the denoiser's folder in the pipeline.
        dtype: of the weights, whatever their stored precision is.
        config: config of a denoiser with extra inputs (families/unet_inputs.py); None is the
            folder's config.
        seed: initializes the weights of the extra inputs.

    Raises:
        WrongInput: a file is missing or damaged, or the weights do not match the config.
    """
    denoiser = empty_denoiser(folder, config)
    files = weight_files(folder)
    weights: dict[str, torch.Tensor] = {}
    for path in files:
        weights |= _read_weights(path, dtype)
    if config is not None:
        known = {n: weights[n].float().numpy() for n in source_weight_names(config) if n in weights}
        added = added_weights(known, config, seed)
        weights |= {name: torch.from_numpy(array).to(dtype) for name, array in added.items()}
    check_fit(files[0], _shapes(denoiser.state_dict()), _shapes(weights))
    denoiser.load_state_dict(weights, assign=True)
    return denoiser


def empty_denoiser(folder: Path, config: dict[str, Any] | None = None) -> Any:
    """Construct a denoiser on the `meta` device from `config`, or else from the folder's config.

    Raises:
        WrongInput: the config does not describe a supported denoiser.
    """
    config = read_config(folder / "config.json") if config is None else config
    known = denoiser_classes()
    kind = config.get("_class_name", known[0])
    if kind not in known:
        raise WrongInput(
            f"{folder / 'config.json'}: a denoiser of class {kind} is not known here (known: "
            f"{', '.join(known)})"
        )
    try:
        with torch.device("meta"):  # skips the random initialization of weights
            return getattr(diffusers, kind).from_config(config)
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        raise WrongInput(f"{folder / 'config.json'}: not a denoiser's config: {error}") from None


def empty_text_encoder(model_folder: Path, part: str) -> Any:
    """Construct a text encoder of a pipeline on the `meta` device. Raises WrongInput."""
    kind = getattr(transformers, text_class(model_folder, part))
    config = kind.config_class.from_dict(read_config(model_folder / part / "config.json"))
    with torch.device("meta"):
        return kind(config)


def load_text_encoder(
    model_folder: Path,
    part: str,
    dtype: torch.dtype = torch.float32,
    folder: Path | None = None,
) -> Any:
    """Load a text encoder to the CPU, in evaluation mode.

    Args:
        model_folder: the diffusers pipeline; its model_index.json names the encoder's class.
        part: component name, such as `text_encoder_2`.
        dtype: of the weights.
        folder: folder of trained weights; None is the pipeline's own folder.

    Raises:
        WrongInput: weights are missing or damaged, or do not match their config.
    """
    folder = folder or model_folder / part
    kind = getattr(transformers, text_class(model_folder, part))
    disable_progress_bar()  # the stage reports loading
    try:
        model, loaded = kind.from_pretrained(
            folder,
            torch_dtype=dtype,
            variant=weight_variant(folder),
            output_loading_info=True,
            **SAFE,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise WrongInput(f"{folder} does not load: {one_line(error)}") from None
    if missing := sorted(loaded["missing_keys"]):
        raise WrongInput(f"{folder} lacks {len(missing)} weights, such as {missing[0]}")
    return model.eval()


def _read_weights(path: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as stream:
            return {name: stream.get_tensor(name).to(dtype) for name in stream.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise WrongInput(f"{path} cannot be read: {error}") from None


def _shapes(weights: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}
