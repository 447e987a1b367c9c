"""The rows of `bench.train --runtime mindspore`: time and memory against mindone's step."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench import benchmark_inputs, run_kilnworks
from bench.report import Row, Skip
from bench.training_step_workloads import Context, Workload
from runtimes.process.job import TrainJob, write_job
from runtimes.registry import interpreter, probe_runtime

SMALL = Workload("small", benchmark_inputs.write_pipeline, pictures=100, size=32, batch=16)
TENFOLD = replace(SMALL, name="tenfold", pictures=1000)
#: Steps of an epoch.
EPOCH = TENFOLD.pictures // TENFOLD.batch
#: Settings as in mindone's step.
SETTINGS: dict[str, Any] = {"snr_gamma": None, "device": "cpu"}
#: Operators that MindSpore's CPU backend lacks, for processes with this folder on their path.
MINDSPORE_HOST = Path(__file__).parents[1] / "tests" / "mindspore_host"


def _job(context: Context, workload: Workload, folder: Path, **train: Any) -> TrainJob:
    paths = [str(MINDSPORE_HOST), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
    return replace(context.job(workload, "full", folder, **SETTINGS, **train), runtime="mindspore")


def _measure(job: TrainJob, folder: Path, *arguments: object) -> dict[str, Any]:
    write_job(job, folder / "job.json")
    words = [str(folder / "job.json"), *map(str, arguments)]
    _, result = run_kilnworks.run_module(
        "bench.mindone_step", *words, python=interpreter("mindspore")
    )
    return dict(result)


def step_row(context: Context, name: str, *, mode: str) -> Row:
    """Seconds per step and peak memory: mindone's step against ours."""
    _require_mindspore()
    steps = context.timed_steps(SMALL)
    with context.scratch() as folder:
        job = _job(context, SMALL, folder)
        result = _measure(job, folder, context.rounds, steps, mode)
        memory = {
            side: _measure(job, folder, 1, 2, mode, side)["memory_bytes"]
            for side in ("theirs", "ours")
        }
    ratios = {name: result["ratio"]["median"], f"{name}_memory": memory["theirs"] / memory["ours"]}
    more = {"memory_bytes": memory["ours"], "peer_memory_bytes": memory["theirs"]}
    unet = benchmark_inputs.count_parameters(context.files(SMALL).model)
    return Row(name, ratios, {**result, **more, "unet_parameters": unet, "batch": SMALL.batch})


def memory_row(context: Context, name: str) -> Row:
    """Peak memory with 100 pictures over that with 1,000: our loop, and mindone's step.

    mindone's script holds its dataset in memory.
    """
    _require_mindspore()
    figures: dict[str, Any] = {}
    ratios = {}
    for side in ("", "peer_"):
        few, many = (_peak(context, workload, theirs=bool(side)) for workload in (SMALL, TENFOLD))
        ratios[f"{side}{name}"] = few / many
        for workload, peak in ((SMALL, few), (TENFOLD, many)):
            figures[f"{side}memory_bytes_{workload.pictures}_pictures"] = peak
    return Row(name, ratios, figures)


def _peak(context: Context, workload: Workload, *, theirs: bool) -> int:
    with context.scratch() as folder:
        job = _job(context, workload, folder, steps=EPOCH)
        if theirs:
            result = _measure(job, folder, 1, 2, "pynative", "theirs")
            return int(result["memory_bytes"])
        return run_kilnworks.time_loop(job).memory_bytes


def _require_mindspore() -> None:
    """Raise Skip if runtime mindspore is not installed."""
    found = probe_runtime("mindspore")
    if not found.available:
        raise Skip(found.reason)


#: mindone's script trains in graph mode; our default is pynative.
MINDSPORE_ROWS: dict[str, Callable[[Context, str], Row]] = {
    "step_vs_mindone": partial(step_row, mode="graph"),
    "step_vs_mindone_pynative": partial(step_row, mode="pynative"),
    "memory_of_a_tenth": memory_row,
}
