"""Assemble what is published: a diffusers folder, a ControlNet, or adapters in two layouts.

A pipeline folder has the base's parts and the trained parts. LoRA adapters are in diffusers' format
and in the layout of kohya's sd-scripts.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from artifacts.safetensors import Arrays
from artifacts.tensor_header import header_bytes
from configs.errors import Refused
from runtimes.adapters import lora_files
from runtimes.adapters.lora import Adapter, stored_name
from runtimes.objective.noise_schedule import SCHEDULER_FILE, read_scheduler_config
from runtimes.pipeline_folder.folder import Base, folder_extras
from runtimes.pipeline_folder.weights import stored_weight_files

#: Where the part of a config was loaded from, on the machine that wrote it; no loader reads it.
ORIGIN = {"_name_or_path", "name_or_path", "special_tokens_map_file", "tokenizer_file"}
WEIGHTS = (".safetensors", ".bin", ".pt", ".ckpt", ".msgpack", ".onnx", ".h5")


def assemble(
    base: Base,
    replacements: Mapping[str, Path],
    out: Path,
    *,
    dtype: str,
    adapters: lora_files.Adapters | None = None,
) -> None:
    """Write a folder that `DiffusionPipeline.from_pretrained` loads.

    Every part of the base's model_index.json is copied. Its weights are cast to `dtype` and stored
    in one file with the standard name. Adapters are merged into the weights in float32.
    Without a dtype, `from_pretrained` loads every part in float32.

    Args:
        base: the pipeline; the VAE that replaces its own is copied instead.
        replacements: part name -> folder that replaces the base's part.
        dtype: PyTorch name of a float dtype.
        adapters: part name -> adapters to merge.

    Raises:
        FileNotFoundError: a part or its weights are missing.
        Refused: a part lacks a layer of its adapters, or a weight does not fit `dtype`.
    """
    adapters = adapters or {}
    out.mkdir(parents=True, exist_ok=True)
    index = dict(base.index)
    if "scheduler" in replacements:  # its class may differ from the base's
        config = json.loads(
            (replacements["scheduler"] / SCHEDULER_FILE).read_text(encoding="utf-8")
        )
        index["scheduler"] = ["diffusers", config["_class_name"]]
    denoiser = replacements.get(base.family.denoiser, base.denoiser_folder)
    if folder_extras(denoiser).inpainting:
        index["_class_name"] = base.family.pipelines[-1]
    for part, spec in index.items():
        is_part = isinstance(spec, list) and len(spec) == 2 and spec[0] is not None
        if is_part:
            source = replacements.get(part, base.part(part))
            merging = _Merging(part, adapters.get(part, {}))
            _copy_part(source, out / part, dtype, merging)
    (out / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    _forget_origin(out / "model_index.json")


def write_control(control: Path, out: Path, *, dtype: str, scheduler: Path | None) -> None:
    """Write a folder that diffusers loads as a ControlNet.

    Args:
        control: the ControlNet's folder of the train stage.
        out: output folder, created if missing.
        dtype: precision of the written weights, by its PyTorch name.
        scheduler: folder of the scheduler if it differs from the base's.

    Raises:
        Refused: a weight does not fit `dtype`.
    """
    _copy_part(control, out, dtype, _Merging(control.name, {}))
    if scheduler is not None:
        shutil.copytree(scheduler, out / "scheduler", dirs_exist_ok=True)


class _Merging:
    """Merges a part's adapters into its weights, tensor by tensor."""

    def __init__(self, part: str, adapters: Mapping[str, Adapter]) -> None:
        self._part = part
        self._unused = dict(adapters)

    def __call__(self, name: str, tensor: Any) -> Any:
        adapter = self._unused.pop(stored_name(self._part, name.removesuffix(".weight")), None)
        if adapter is None or not name.endswith(".weight"):
            return tensor
        import torch

        return torch.from_numpy(adapter.merged(tensor.float().numpy()))

    def finish(self) -> None:
        """Raise Refused if an adapter had no layer."""
        if self._unused:
            raise Refused(f"the adapters are for another model: it has no {min(self._unused)}")


def _copy_part(source: Path, target: Path, dtype: str, merging: _Merging) -> None:
    if not source.is_dir():
        raise FileNotFoundError(f"{source} is missing: the base's model_index.json names it")
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        is_index = path.name.endswith(".index.json")
        if path.is_file() and path.suffix.lower() not in WEIGHTS and not is_index:
            shutil.copyfile(path, target / path.name)
            if path.name.endswith("config.json"):
                _forget_origin(target / path.name)
    weights = stored_weight_files(source)
    if weights:
        stem = re.split(r"[.-]", weights[0].name, maxsplit=1)[0]
        _cast(weights, target / f"{stem}.safetensors", dtype, merging, _hub_names(source))
        _load_as_float32(target / "config.json")
        merging.finish()
    elif _wants_weights(source):
        raise FileNotFoundError(f"{source} has no .safetensors weights")


def _forget_origin(path: Path) -> None:
    """Take local paths of this or another machine out of a config."""
    config = json.loads(path.read_text(encoding="utf-8"))
    kept = {name: value for name, value in config.items() if name not in ORIGIN}
    if kept != config:
        path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def _hub_names(part: Path) -> Callable[[str], str]:
    """A function from a weight's name to its name on the hub.

    transformers 5 omits CLIP's prefix `text_model.`; older versions would load random weights.
    """
    config = json.loads((part / "config.json").read_text(encoding="utf-8"))
    is_clip = config.get("model_type") == "clip_text_model"
    return partial(stored_name, "text_encoder") if is_clip else str


def _load_as_float32(path: Path) -> None:
    """Name float32 in the config of a transformers model, as diffusers loads its own models.

    transformers 5 otherwise keeps the stored dtype, and half embeddings meet a float32 denoiser.
    """
    config = json.loads(path.read_text(encoding="utf-8"))
    if "_class_name" not in config:  # diffusers' own key
        config.pop("torch_dtype", None)  # the name before transformers 4.56
        path.write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n", "utf-8")


def model_parts(base: Base) -> list[Path]:
    """The folders of a pipeline's parts that are models; a missing folder counts."""
    entries = base.index.items()
    parts = [base.part(p) for p, s in entries if isinstance(s, list) and s[0] is not None]
    return [part for part in parts if _wants_weights(part)]


def _wants_weights(folder: Path) -> bool:
    """Whether a part is a model: tokenizers, schedulers and processors have no config.json."""
    return not folder.is_dir() or (folder / "config.json").is_file()


def cast(name: str, tensor: Any, dtype: str) -> Any:
    """The tensor as `dtype` if it is floating point, else unchanged; contiguous.

    Raises:
        Refused: a finite value overflows `dtype`.
    """
    import torch

    if not tensor.is_floating_point():
        return tensor.contiguous()
    half = tensor.to(getattr(torch, dtype))
    if tensor.isfinite().all() and not half.isfinite().all():
        raise Refused(f"publish.dtype: {name} does not fit {dtype}: set bfloat16 or float32")
    return half.contiguous()


def _cast(
    sources: list[Path], target: Path, dtype: str, merging: _Merging, hub_name: Callable[[str], str]
) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    tensors: dict[str, Any] = {}
    for source in sources:
        with safe_open(source, framework="pt") as stream:
            for name in stream.keys():  # noqa: SIM118 (not a dict)
                merged = merging(name, stream.get_tensor(name))
                tensors[hub_name(name)] = cast(name, merged, dtype)
    save_file(dict(sorted(tensors.items())), target, metadata={"format": "pt"})


log = logging.getLogger("kiln")
KOHYA_SUFFIX = "_kohya.safetensors"
#: Element types as PyTorch and safetensors name them.
DTYPES = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}


def write_adapters(
    lora: Path, base: Base, out: Path, *, name: str, dtype: str, scheduler: Path | None
) -> None:
    """Write `pytorch_lora_weights.safetensors` and, if possible, `<name>_kohya.safetensors`.

    Args:
        lora: adapter file of the train stage.
        base: the pipeline that they change.
        out: output folder, created if missing.
        name: stem of the kohya file.
        dtype: precision of the written weights, by its PyTorch name.
        scheduler: folder of the scheduler if it differs from the base's.

    Raises:
        Refused: a weight does not fit `dtype`.
    """
    from safetensors import safe_open

    out.mkdir(parents=True, exist_ok=True)
    with safe_open(lora, framework="pt") as stream:
        tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
        tensors, header = lora_files.with_alpha_in_weights(tensors, stream.metadata())
    _save(tensors, out / lora_files.LORA_WEIGHTS, dtype, header)
    if scheduler is not None:
        shutil.copytree(scheduler, out / "scheduler", dirs_exist_ok=True)
    arrays, header = _as_kohya(lora, base, scheduler or base.part("scheduler"), name)
    if arrays:
        _save(arrays, out / f"{name}{KOHYA_SUFFIX}", dtype, header)


def _as_kohya(lora: Path, base: Base, scheduler: Path, name: str) -> tuple[Arrays, dict[str, str]]:
    """The arrays and header in kohya's layout; none, with a warning, if it has no names."""
    family = base.family
    if family.kohya is None:
        log.warning("publish: no file in kohya's layout: it does not support %s", family.name)
        return {}, {}
    config = base.denoiser
    adapters = lora_files.read_adapters(lora)
    kind = read_scheduler_config(scheduler).get("prediction_type", "epsilon")
    header = lora_files.kohya_header(
        adapters, family.kohya, config, prediction_type=kind, name=name
    )
    try:
        return lora_files.to_kohya(adapters, family.kohya, config), header
    except ValueError as error:
        log.warning("publish: no file in kohya's layout: %s", error)
        return {}, {}


def _save(arrays: Mapping[str, Any], path: Path, dtype: str, header: Mapping[str, str]) -> None:
    """Write safetensors, deterministically: its own library orders a header by chance."""
    import torch

    tensors = {name: torch.as_tensor(array) for name, array in arrays.items()}
    tensors = {
        # Alpha scales the whole adapter: half precision could round or overflow it.
        name: tensor if name.endswith(".alpha") else cast(name, tensor, dtype)
        for name, tensor in tensors.items()
    }
    # The wider first, as the library has them: readers map a tensor at a multiple of its size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    with path.open("wb") as stream:
        places = ((n, DTYPES[str(t.dtype)], t.shape, t.nbytes) for n, t in ordered)
        stream.write(header_bytes(places, dict(sorted(header.items()))))
        for _, tensor in ordered:
            stream.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
