"""What a training run leaves: whole parts of the pipeline, or adapters; and its history.

<out>/unet/config.json, diffusion_pytorch_model.safetensors    method full: each trained part
<out>/text_encoder/config.json, model.safetensors
<out>/pytorch_lora_weights.safetensors                         method lora, as diffusers loads it
<out>/scheduler/scheduler_config.json                          if it is not the base's any more
<out>/history.jsonl                                            one line a step
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from artifacts.commit import write_atomic
from artifacts.safetensors import Arrays, write_arrays, writing
from configs.training import Train
from runtimes.adapters.lora import LORA_WEIGHTS, as_stored, metadata
from runtimes.contract import State
from runtimes.objective.noise_scheduler import SCHEDULER_FILE, trained_scheduler
from runtimes.pipeline_folder.denoiser_config import job_config
from runtimes.process.job import TrainJob

WEIGHTS = "diffusion_pytorch_model.safetensors"
TEXT_WEIGHTS = "model.safetensors"  # transformers' name


def write_result(job: TrainJob, state: State, history: list[str]) -> list[str]:
    """Write what was trained (fp32; the average, if one was kept) and `history.jsonl` to `out`.

    Returns the files' paths below it.
    """
    fs, root = url_to_fs(job.out)
    files = ["history.jsonl"]
    settings, trained = Train(**job.train), state.get("ema") or state["weights"]
    if settings.method == "lora":
        files.append(LORA_WEIGHTS)
        with writing(fs, root, LORA_WEIGHTS, []) as sink:
            write_arrays(sink, as_stored(trained), metadata(trained, settings.lora))
    else:
        for part, arrays in by_part(trained | state.get("constants", {})).items():
            files += _write_part(fs, root, _config(job, part), part, arrays)
    scheduler = trained_scheduler(Path(job.model) / "scheduler", settings)
    if scheduler is not None:
        files.append(f"scheduler/{SCHEDULER_FILE}")
        text = json.dumps(scheduler, indent=2, sort_keys=True) + "\n"
        write_atomic(fs, f"{root}/{files[-1]}", text.encode())
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


def _config(job: TrainJob, part: str) -> dict[str, Any]:
    """The config that a part was made by."""
    if not part.startswith("text_encoder"):
        return job_config(job, Train(**job.train))
    path = Path(job.model) / part / "config.json"
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _write_part(
    fs: AbstractFileSystem, root: str, config: dict[str, Any], part: str, arrays: Arrays
) -> list[str]:
    # Where the base lay on the machine that made it is nobody's business.
    config = {name: value for name, value in config.items() if name != "_name_or_path"}
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    write_atomic(fs, f"{root}/{part}/config.json", text.encode())
    name = TEXT_WEIGHTS if part.startswith("text_encoder") else WEIGHTS
    with writing(fs, root, f"{part}/{name}", []) as sink:
        write_arrays(sink, arrays)
    return [f"{part}/config.json", f"{part}/{name}"]
