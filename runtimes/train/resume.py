"""Resume a run from its newest checkpoint: weights, optimizer, position in the data, history.

A checkpoint needs no state of the loader or of a random number generator.
bucketed_sample_order.py computes a step's samples from the step's number, and
objective/counter_based_random.py draws by counter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from fsspec.core import url_to_fs

from artifacts.safetensors import read_arrays
from configs.settings.train import Train, key_settings
from runtimes.adapters.lora_file_format import to_state_names
from runtimes.contract import Runtime, StoredRows, WrongInput
from runtimes.process.job import TrainJob
from runtimes.process.ranks import Ranks
from runtimes.train.checkpoint_errors import is_unreachable
from runtimes.train.recorder import Recorder
from runtimes.train.write_and_prune_checkpoints import Checkpoint, Checkpoints


def own_checkpoint(checkpoints: Checkpoints, job: TrainJob, settings: Train) -> Checkpoint | None:
    """The newest checkpoint of this run within its steps. Raises WrongInput as check_same_run."""
    saved = checkpoints.latest()
    if saved is not None:
        check_same_run(saved, job, settings)
        if saved.step > settings.steps:  # this run once had more steps
            if settings.best_checkpoint is not None:
                raise WrongInput(
                    f"{job.work} holds a run of {saved.step} steps, and its best checkpoint within "
                    f"{settings.steps} may be deleted: choose another work folder"
                )
            return checkpoints.latest(settings.steps + 1)
    return saved


def restore(
    saved: Checkpoint, runtime: Runtime, recorder: Recorder, skipped: Sequence[int]
) -> tuple[int, list[int]]:
    """Restore the runtime's state and the history.

    Args:
        skipped: numbers of the batches that this process has skipped so far.

    Returns:
        The number of completed steps, and the numbers of all skipped batches.
    """
    runtime.restore(saved.state, saved.step)
    recorder.begin(saved.history)
    return saved.step, sorted({*skipped, *saved.facts["skipped"]})


def start_from_adapters(url: str, runtime: Runtime) -> None:
    """Load the adapters of a file (in f32) as the weights of step 0, with zero moments.

    Raises:
        WrongInput: the file is damaged, or its adapters are of another model or rank.
    """
    fs, path = url_to_fs(url)
    try:
        adapters = to_state_names(read_arrays(fs, path))
    except (OSError, ValueError) as error:
        if is_unreachable(fs, error):
            raise
        raise WrongInput(f"{url} is no valid adapter file of Kilnworks: {error}") from None
    state: dict[str, Mapping[str, StoredRows]] = {}
    for group, shapes in runtime.state_shapes().items():
        if group in ("weights", "ema"):
            state[group] = adapters
        elif group != "loss_scale":  # without it, the initial scale stays
            state[group] = {n: np.zeros(shape, np.float32) for n, shape in shapes.items()}
    try:
        runtime.restore(state, 0)
    except WrongInput as error:
        raise WrongInput(f"{url}: {error}") from None


def check_same_run(saved: Checkpoint, job: TrainJob, settings: Train) -> None:
    """Raise WrongInput if the checkpoint was written with settings that change the weights.

    `steps` may change unless the weights of a step depend on them.
    Settings that the checkpoint lacks count as defaults: an older version may have written it.
    """
    stored = _with_defaults(saved.facts["train"])
    # What is recomputed changes no weight; an older version wrote true or false.
    known = {name: value for name, value in stored.items() if name in Train.model_fields}
    known["gradient_checkpointing"] = settings.gradient_checkpointing
    now, before = key_settings(settings), key_settings(Train(**known))
    now["denoiser_config"] = job.denoiser_config  # the content: its path may change
    before["denoiser_config"] = saved.facts.get("denoiser_config")
    if settings.method == "lora" and settings.lora.dropout:
        # Dropout masks depend on the rank, so the number of processes must not change.
        now["processes"] = Ranks.here().world
        before["processes"] = saved.facts.get("processes", stored["processes"])
    if not settings.weights_depend_on_steps:
        now["steps"] = before["steps"]
    for name in sorted(now.keys() | before.keys()):  # a setting without effect is in neither
        if before.get(name) != now.get(name):
            then, here = before.get(name, stored.get(name)), now.get(name, getattr(settings, name))
            raise WrongInput(
                f"{job.work} holds a run with train.{name}={then}, this one has {here}: "
                "choose another work folder"
            )


def _with_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """Dumped settings with defaults for missing keys, also in sections."""
    complete = Train().model_dump(mode="json")
    for name, value in given.items():
        if isinstance(value, dict) and isinstance(complete.get(name), dict):
            complete[name] = {**complete[name], **value}
        else:
            complete[name] = value
    return complete
