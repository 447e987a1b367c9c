"""The files that a training run publishes: trained components or adapters, and the history.

<out>/unet/config.json, diffusion_pytorch_model.safetensors    method full: trained components
<out>/text_encoder/config.json, model.safetensors
<out>/pytorch_lora_weights.safetensors                         method lora, diffusers' format
<out>/scheduler/scheduler_config.json                          if it differs from the base's
<out>/history.jsonl                                            one line per step
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from artifacts.records import FileEntry
from artifacts.safetensors import Arrays, Sink, write_arrays, writing
from configs.settings.train import Train
from runtimes.adapters.lora_file_format import LORA_WEIGHTS, metadata, to_file_names
from runtimes.contract import State
from runtimes.objective.scheduler_config import SCHEDULER_FILE, trained_scheduler_config
from runtimes.pipeline_folder.denoiser_config import job_config
from runtimes.pipeline_folder.read_configs import read_part_config
from runtimes.pipeline_folder.weight_files import DENOISER_WEIGHTS, TEXT_WEIGHTS
from runtimes.process.job import TrainJob
from runtimes.train.checkpoint_errors import with_retries


def write_result(job: TrainJob, state: State, history: list[str]) -> list[FileEntry]:
    """Write the trained weights (fp32; the EMA if there is one) and the history to `job.out`.

    A remote store that does not respond is tried again: only memory has the last steps' weights.

    Returns:
        The files, sorted by their paths relative to `job.out`. Each sha256 is of the bytes given
        to the store, so later damage is found.

    Raises:
        LockLost: another builder owns the folder; its files stay as they are.
    """
    fs, root = url_to_fs(job.out)
    failure = "the trained weights could not be written"
    return with_retries(fs, lambda: _write(fs, root, job, state, history), failure)


def _write(
    fs: AbstractFileSystem, root: str, job: TrainJob, state: State, history: list[str]
) -> list[FileEntry]:
    files: list[FileEntry] = []

    def write(path: str) -> AbstractContextManager[Sink]:
        return writing(fs, root, path, files, job.check_lock)

    settings, trained = Train(**job.train), state.get("ema") or state["weights"]
    if settings.method == "lora":
        with write(LORA_WEIGHTS) as sink:
            write_arrays(sink, to_file_names(trained), metadata(trained, settings.lora))
    else:
        for component, arrays in by_component(trained | state.get("constants", {})).items():
            own, stem = job_config(job, settings), DENOISER_WEIGHTS
            if component.startswith("text_encoder"):
                own, stem = read_part_config(job.model_folder, component), TEXT_WEIGHTS
            # _name_or_path is a local path of the machine that trained the base.
            config = {name: value for name, value in own.items() if name != "_name_or_path"}
            with write(f"{component}/config.json") as sink:
                sink.write(_json(config))
            with write(f"{component}/{stem}.safetensors") as sink:
                write_arrays(sink, arrays)
    scheduler = trained_scheduler_config(job.model_folder / "scheduler", settings)
    if scheduler is not None:
        with write(f"scheduler/{SCHEDULER_FILE}") as sink:
            sink.write(_json(scheduler))
    with write("history.jsonl") as sink:
        sink.write("".join(f"{line}\n" for line in history).encode())
    return sorted(files, key=lambda file: file.path)


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def by_component(arrays: Arrays) -> dict[str, Arrays]:
    """Arrays with State's names, grouped by pipeline component, with names inside it."""
    components: dict[str, Arrays] = {}
    for name, array in arrays.items():
        component, _, rest = name.partition(".")
        components.setdefault(component, {})[rest] = array
    return components
