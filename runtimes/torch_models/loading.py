"""Load or make the denoiser and text encoders of a pipeline folder, with checked weights.

Layers of diffusers keep their formulas where torch_npu is installed.

Construct diffusers schedulers from their configs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import diffusers
import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers.utils.logging import disable_progress_bar

from configs.errors import Refused
from configs.secrets import one_line
from configs.settings.train import Train
from runtimes.adapters.lora import Adapter
from runtimes.contract import StoredRows
from runtimes.detect_hardware import torch_npu_version
from runtimes.families import all_families, denoiser_classes
from runtimes.families.inpainting_aesthetics import added_weights, source_weight_names
from runtimes.objective import noise_schedule
from runtimes.pipeline_folder.folder import Base, read_config
from runtimes.pipeline_folder.weights import check_fit, weight_files, weight_variant
from runtimes.torch_models.quantized import quantize_blocks

#: Options of `from_pretrained` that forbid downloads and pickle files.
SAFE = {"local_files_only": True, "use_safetensors": True}

NO_ADAPTERS: Mapping[str, Adapter] = {}


def load_denoiser(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    config: dict[str, Any] | None = None,
    seed: int = 0,
    precision: str | None = None,
    kept: Sequence[str] = (),
    adapters: Mapping[str, Adapter] = NO_ADAPTERS,
) -> Any:
    """Load a denoiser to the CPU and cast its weights to `dtype`.

    Args:
        folder: the denoiser's folder in the pipeline.
        dtype: dtype of the weights, whatever their stored precision is.
        config: config of a denoiser with extra inputs (inpainting_aesthetics.py); None is the
            folder's config.
        seed: initializes the weights of the extra inputs.
        precision: as `train.lora.base_precision`; each layer is quantized when it is read.
        kept: as in `quantize_blocks`.
        adapters: layer -> adapter to merge, in float32, before weights are cast or quantized.

    Raises:
        Refused: a file is missing or damaged, or the weights do not match the config.
    """
    denoiser = empty_denoiser(folder, config)
    weights = open_weights(denoiser, folder, dtype, config, seed, adapters)
    if precision is not None:
        quantize_blocks(denoiser, precision, kept, lambda name: weights.pop(name)[...])
    tensors = {name: w[...] for name, w in weights.items()}
    denoiser.load_state_dict(tensors, assign=True, strict=precision is None)
    return denoiser


def open_weights(
    denoiser: Any,
    folder: Path,
    dtype: torch.dtype,
    config: dict[str, Any] | None,
    seed: int,
    adapters: Mapping[str, Adapter] = NO_ADAPTERS,
) -> dict[str, StoredRows]:
    """The weights of a denoiser, for `load_state_dict`; indexing them reads rows as `dtype`.

    Only headers are read, and the weights from which the weights of extra inputs are computed.

    Args:
        denoiser: from `empty_denoiser`.

    Other arguments and errors are those of `load_denoiser`.
    """
    files = weight_files(folder)
    weights: dict[str, StoredRows] = {}
    for path in files:
        try:
            stream = safe_open(path, framework="pt")
            for name in stream.keys():  # noqa: SIM118
                adapter = adapters.get(name.removesuffix(".weight"))
                weights[name] = _FileTensor(stream.get_slice(name), dtype, adapter)
        except (SafetensorError, OSError) as error:
            raise Refused(f"{path} cannot be read: {error}") from None
    if config is not None:
        names = [name for name in source_weight_names(config) if name in weights]
        known = {name: weights[name][...].float().numpy() for name in names}
        added = added_weights(known, config, seed)
        weights |= {name: torch.from_numpy(array).to(dtype) for name, array in added.items()}
    check_fit(files[0], _shapes(denoiser.state_dict()), _shapes(weights))
    return weights


@dataclass(frozen=True)
class _FileTensor:
    """A tensor in a safetensors file; when it is read, its adapter is merged, and it is cast."""

    stored: Any  # safetensors' slice, which maps the file
    dtype: torch.dtype
    adapter: Adapter | None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stored.get_shape())

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows = self.stored[index]
        if self.adapter is not None:
            merged = self.adapter.rows(index).merged(rows.float().numpy())
            rows = torch.from_numpy(merged)
        return rows.to(self.dtype)


def empty_denoiser(folder: Path, config: dict[str, Any] | None) -> Any:
    """Construct a denoiser on the `meta` device from `config`, or else from the folder's config.

    Raises:
        Refused: the config does not describe a supported denoiser.
    """
    config = read_config(folder / "config.json") if config is None else config
    known = denoiser_classes()
    kind = config.get("_class_name", known[0])
    if kind not in known:
        raise Refused(
            f"{folder / 'config.json'}: a denoiser of class {kind} is not known here (known: "
            f"{', '.join(known)})"
        )
    try:
        with torch.device("meta"):  # skips the random initialization of weights
            denoiser = getattr(diffusers, kind).from_config(config)
    except Exception as error:  # of any type, such as AssertionError without a message
        reason = str(error) or type(error).__name__
        raise Refused(f"{folder / 'config.json'}: not a denoiser's config: {reason}") from None
    family = next(f for f in all_families().values() if f.denoiser_class == kind)
    family.make_constants(denoiser)
    return denoiser


def random_init_denoiser(config: Mapping[str, Any], seed: int) -> Any:
    """Construct a denoiser with diffusers' random initialization, in float32 on the CPU.

    With the same versions of PyTorch and diffusers, the weights depend on the seed alone.

    Raises:
        Refused: the config does not describe a denoiser.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return getattr(diffusers, config["_class_name"]).from_config(config)
    except Exception as error:  # of any type, such as AssertionError without a message
        reason = str(error) or type(error).__name__
        raise Refused(f"train.denoiser_config makes no denoiser: {reason}") from None


def empty_text_encoder(base: Base, part: str) -> Any:
    """Construct a text encoder of a pipeline on the `meta` device. Raises Refused."""
    kind = getattr(transformers, base.text_class(part))
    with torch.device("meta"):
        return kind(kind.config_class.from_dict(base.config(part)))


def load_text_encoder(
    base: Base,
    part: str,
    dtype: torch.dtype = torch.float32,
    folder: Path | None = None,
    precision: str | None = None,
) -> Any:
    """Load a text encoder to the CPU, in evaluation mode.

    Weights of `dtype` are mapped from their files.

    Args:
        base: the pipeline; its model_index.json names the encoder's class.
        part: component name, such as `text_encoder_2`.
        dtype: dtype of the weights.
        folder: folder of trained weights; None is the pipeline's own folder.
        precision: as `encode.text_precision`.

    Raises:
        Refused: weights are missing or damaged, or do not match their config.
    """
    folder = folder or base.part(part)
    kind = getattr(transformers, base.text_class(part))
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
        raise Refused(f"{folder} does not load: {one_line(error)}") from None
    if missing := sorted(loaded["missing_keys"]):
        raise Refused(f"{folder} lacks {len(missing)} weights, such as {missing[0]}")
    if precision is not None:
        quantize_blocks(model, precision)
    return model.eval()


def _shapes(weights: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def keep_diffusers_formulas(network: torch.nn.Module) -> None:
    """Replace the forward methods of layers that diffusers specializes for torch_npu.

    If torch_npu is importable, GEGLU and RMSNorm of diffusers call its operators on every device,
    and fail on a CPU. On an NPU, diffusers' GEGLU (arXiv 2002.05202) uses the tanh approximation of
    GELU, which other devices do not.
    """
    if torch_npu_version() is None:
        return
    from diffusers.models.activations import GEGLU
    from diffusers.models.normalization import RMSNorm

    own = {GEGLU: _geglu, RMSNorm: _rms_norm}
    for module in network.modules():
        if type(module) in own:
            module.forward = MethodType(own[type(module)], module)


def _geglu(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
    projected = layer.proj(inputs)  # [..., 2 D]
    if projected.device.type == "npu":
        import torch_npu

        return torch_npu.npu_geglu(projected, dim=-1, approximate=0)[0]
    states, gate = projected.chunk(2, dim=-1)
    return states * torch.nn.functional.gelu(gate)


def _rms_norm(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
    if inputs.device.type == "npu" or layer.weight is None:
        return type(layer).forward(layer, inputs)
    normal = inputs * (inputs.float().square().mean(-1, keepdim=True) + layer.eps).rsqrt()
    if layer.weight.dtype in (torch.float16, torch.bfloat16):
        normal = normal.to(layer.weight.dtype)
    normal = normal * layer.weight
    return normal if layer.bias is None else normal + layer.bias


def make_scheduler(config: Mapping[str, Any]) -> Any:
    """Construct the scheduler of the class `_class_name` in a config.

    Raises:
        Refused: diffusers has no scheduler of that name.
    """
    name = str(config.get("_class_name"))
    kind = getattr(diffusers, name, None)
    if kind is None or not issubclass(kind, diffusers.SchedulerMixin):
        raise Refused(f"the scheduler {name} is not of this version of diffusers")
    return kind.from_config(dict(config))


def trained_scheduler(base: Base, settings: Train) -> Any:
    """The scheduler of the trained model, or None where the settings keep the base's."""
    config = noise_schedule.trained_scheduler_config(base.scheduler, settings)
    return None if config is None else make_scheduler(config)
