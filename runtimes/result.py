"""What a training run leaves: whole parts of the pipeline, or adapters; and its history.

<out>/unet/config.json, diffusion_pytorch_model.safetensors    method full: each trained part
<out>/text_encoder/config.json, model.safetensors
<out>/pytorch_lora_weights.safetensors                         method lora, as diffusers loads it
<out>/history.jsonl                                            one line a step
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from artifacts.commit import write_atomic
from runtimes.base import State
from runtimes.job import TrainJob
from runtimes.tensors import Arrays, write_arrays, writing

WEIGHTS = "diffusion_pytorch_model.safetensors"
TEXT_WEIGHTS = "model.safetensors"  # transformers' name
LORA_WEIGHTS = "pytorch_lora_weights.safetensors"


def write_result(job: TrainJob, state: State, history: list[str]) -> list[str]:
    """Write what was trained (fp32; the average, if one was kept) and `history.jsonl` to `out`.

    Returns the files' paths below it.
    """
    fs, root = url_to_fs(job.out)
    files = ["history.jsonl"]
    for part, arrays in by_part(state.get("ema") or state["weights"]).items():
        files += _write_part(fs, root, Path(job.model), part, arrays)
    lines = "".join(f"{line}\n" for line in history)
    write_atomic(fs, f"{root}/history.jsonl", lines.encode())
    return sorted(files)


def by_part(arrays: Arrays) -> dict[str, Arrays]:
    """The arrays of each part of the pipeline, by their names within it."""
    parts: dict[str, Arrays] = {}
    for name, array in arrays.items():
        part, _, rest = name.partition(".")
        parts.setdefault(part, {})[rest] = array
    return parts


def _write_part(
    fs: AbstractFileSystem, root: str, model: Path, part: str, arrays: Arrays
) -> list[str]:
    config: dict[str, Any] = json.loads((model / part / "config.json").read_text(encoding="utf-8"))
    config.pop("_name_or_path", None)  # where the base lay on the machine that made it
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    write_atomic(fs, f"{root}/{part}/config.json", text.encode())
    name = TEXT_WEIGHTS if part.startswith("text_encoder") else WEIGHTS
    with writing(fs, root, f"{part}/{name}", []) as sink:
        write_arrays(sink, arrays)
    return [f"{part}/config.json", f"{part}/{name}"]
