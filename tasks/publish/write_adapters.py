"""Publish LoRA adapters in diffusers' format and in the layout of kohya's sd-scripts."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from artifacts.safetensors import Arrays
from runtimes.adapters import kohya_format as kohya
from runtimes.adapters.lora_file_format import LORA_WEIGHTS, read_adapters, with_alpha_in_weights
from runtimes.families import detect_family
from tasks.publish.assemble_pipeline import cast

log = logging.getLogger("kiln")
KOHYA_SUFFIX = "_kohya.safetensors"


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
    if arrays := _as_kohya(lora, base):
        _save(arrays, out / f"{name}{KOHYA_SUFFIX}", dtype, {"format": "pt"})


def _as_kohya(lora: Path, base: Path) -> Arrays:
    """The adapters in kohya's layout; empty, with a warning, if it has no names for them."""
    family = detect_family(base)
    if family.kohya is None:
        log.warning("publish: no file in kohya's layout: it does not support %s", family.name)
        return {}
    config = json.loads((base / family.denoiser / "config.json").read_text(encoding="utf-8"))
    try:
        return kohya.to_kohya(read_adapters(lora), family.kohya, config)
    except ValueError as error:
        log.warning("publish: no file in kohya's layout: %s", error)
        return {}


def _save(
    arrays: Mapping[str, Any], path: Path, dtype: str, metadata: dict[str, str] | None
) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {name: torch.as_tensor(array) for name, array in arrays.items()}
    tensors = {
        # Alpha scales the whole adapter: half precision could round or overflow it.
        name: tensor if name.endswith(".alpha") else cast(name, tensor, dtype)
        for name, tensor in tensors.items()
    }
    save_file(tensors, path, metadata=metadata)
