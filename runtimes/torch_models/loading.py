"""Load or make the denoiser and text encoders of a pipeline folder, with checked weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers.utils.logging import disable_progress_bar

from configs.secrets import one_line
from runtimes.contract import StoredRows, WrongInput
from runtimes.families import all_families, denoiser_classes
from runtimes.families.inpainting_and_scores import added_weights, source_weight_names
from runtimes.pipeline_folder.describe_encoders import text_class
from runtimes.pipeline_folder.read_configs import read_config, read_part_config
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
        config: config of a denoiser with extra inputs (inpainting_and_scores.py); None is the
            folder's config.
        seed: initializes the weights of the extra inputs.

    Raises:
        WrongInput: a file is missing or damaged, or the weights do not match the config.
    """
    denoiser = empty_denoiser(folder, config)
    weights = open_weights(denoiser, folder, dtype, config, seed)
    denoiser.load_state_dict({name: w[...] for name, w in weights.items()}, assign=True)
    return denoiser


def open_weights(
    denoiser: Any,
    folder: Path,
    dtype: torch.dtype,
    config: dict[str, Any] | None,
    seed: int,
) -> dict[str, StoredRows]:
    """The weights of a denoiser, for `load_state_dict`; indexing one reads its rows as `dtype`.

    Only headers are read, and the weights from which those of extra inputs are computed.

    Args:
        denoiser: from `empty_denoiser`.

    Other arguments and errors are those of `load_denoiser`.
    """
    files = weight_files(folder)
    weights: dict[str, StoredRows] = {}
    for path in files:
        weights |= _open_file(path, dtype)
    if config is not None:
        names = [name for name in source_weight_names(config) if name in weights]
        known = {name: weights[name][...].float().numpy() for name in names}
        added = added_weights(known, config, seed)
        weights |= {name: torch.from_numpy(array).to(dtype) for name, array in added.items()}
    check_fit(files[0], _shapes(denoiser.state_dict()), _shapes(weights))
    return weights


@dataclass(frozen=True)
class _FileTensor:
    """A tensor in a safetensors file, cast when it is read."""

    stored: Any  # safetensors' slice, which maps the file
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stored.get_shape())

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows: torch.Tensor = self.stored[index]
        return rows.to(self.dtype)


def empty_denoiser(folder: Path, config: dict[str, Any] | None) -> Any:
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
            denoiser = getattr(diffusers, kind).from_config(config)
    except Exception as error:  # of any type, such as AssertionError without a message
        reason = str(error) or type(error).__name__
        raise WrongInput(f"{folder / 'config.json'}: not a denoiser's config: {reason}") from None
    for family in all_families().values():
        if family.denoiser_class == kind:
            family.make_constants(denoiser)
            break
    return denoiser


def random_init_denoiser(config: Mapping[str, Any], seed: int) -> Any:
    """Construct a denoiser with diffusers' random initialization, in float32 on the CPU.

    With the same versions of PyTorch and diffusers, the weights depend on the seed alone.

    Raises:
        WrongInput: the config does not describe a denoiser.
    """
    try:
        kind = getattr(diffusers, config["_class_name"])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return kind.from_config(config)
    except Exception as error:  # of any type, such as AssertionError without a message
        reason = str(error) or type(error).__name__
        raise WrongInput(f"train.denoiser_config makes no denoiser: {reason}") from None


def empty_text_encoder(model_folder: Path, part: str) -> Any:
    """Construct a text encoder of a pipeline on the `meta` device. Raises WrongInput."""
    kind = getattr(transformers, text_class(model_folder, part))
    config = kind.config_class.from_dict(read_part_config(model_folder, part))
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


def _open_file(path: Path, dtype: torch.dtype) -> dict[str, StoredRows]:
    try:
        stream = safe_open(path, framework="pt")
        return {name: _FileTensor(stream.get_slice(name), dtype) for name in stream.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise WrongInput(f"{path} cannot be read: {error}") from None


def _shapes(weights: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}
