"""Publish LoRA adapters in diffusers' format and in the layout of kohya's sd-scripts."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from artifacts.safetensors import Arrays
from artifacts.tensor_header import header_bytes
from runtimes.adapters import lora as kohya
from runtimes.adapters.lora import LORA_WEIGHTS, read_adapters, with_alpha_in_weights
from runtimes.families import detect_family
from runtimes.objective.noise_schedule import read_scheduler_config
from tasks.publish.assemble_pipeline import cast

log = logging.getLogger("kiln")
KOHYA_SUFFIX = "_kohya.safetensors"
#: Element types as PyTorch and safetensors name them.
DTYPES = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}


def write_adapters(
    lora: Path, base: Path, out: Path, *, name: str, dtype: str, scheduler: Path | None
) -> None:
    """Write `pytorch_lora_weights.safetensors` and, if possible, `<name>_kohya.safetensors`.

    Args:
        lora: adapter file of the train stage.
        base: pipeline folder of the base.
        out: output folder, created if missing.
        name: stem of the kohya file.
        dtype: precision of the written weights, by its PyTorch name.
        scheduler: folder of the scheduler if it differs from the base's.

    Raises:
        WrongInput: a weight does not fit `dtype`.
    """
    from safetensors import safe_open

    out.mkdir(parents=True, exist_ok=True)
    with safe_open(lora, framework="pt") as stream:
        tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
        tensors, header = with_alpha_in_weights(tensors, stream.metadata())
    _save(tensors, out / LORA_WEIGHTS, dtype, header)
    if scheduler is not None:
        shutil.copytree(scheduler, out / "scheduler", dirs_exist_ok=True)
    arrays, header = _as_kohya(lora, base, scheduler or base / "scheduler", name)
    if arrays:
        _save(arrays, out / f"{name}{KOHYA_SUFFIX}", dtype, header)


def _as_kohya(lora: Path, base: Path, scheduler: Path, name: str) -> tuple[Arrays, dict[str, str]]:
    """The arrays and header in kohya's layout; none, with a warning, if it has no names."""
    family = detect_family(base)
    if family.kohya is None:
        log.warning("publish: no file in kohya's layout: it does not support %s", family.name)
        return {}, {}
    config = json.loads((base / family.denoiser / "config.json").read_text(encoding="utf-8"))
    adapters = read_adapters(lora)
    kind = read_scheduler_config(scheduler).get("prediction_type", "epsilon")
    header = kohya.kohya_header(adapters, family.kohya, config, prediction_type=kind, name=name)
    try:
        return kohya.to_kohya(adapters, family.kohya, config), header
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
