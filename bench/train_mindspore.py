"""The rows of `bench.train --runtime mindspore`: against mindone's own step, and our memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench import inputs, ours
from bench.report import Row
from bench.steps import Context, Scale
from runtimes.process.job import TrainJob, write_job
from runtimes.registry import interpreter, probe_runtime

SMALL = Scale("small", inputs.write_pipeline, pictures=100, size=32, batch=16)
TENFOLD = replace(SMALL, name="tenfold", pictures=1000)
#: Steps that see all of it.
EPOCH = TENFOLD.pictures // TENFOLD.batch
#: Theirs has neither; what ours weigh is drawn on the host.
ALIKE: dict[str, Any] = {"snr_gamma": None, "device": "cpu"}


def _job(context: Context, scale: Scale, folder: Path, **train: Any) -> TrainJob:
    return replace(context.job(scale, "full", folder, **ALIKE, **train), runtime="mindspore")


def _measure(job: TrainJob, folder: Path, *arguments: object) -> dict[str, Any]:
    write_job(job, folder / "job.json")
    words = [str(folder / "job.json"), *map(str, arguments)]
    _, found = ours.run_module("bench.mindone_step", *words, python=interpreter("mindspore"))
    return dict(found)


def step_row(context: Context, name: str, *, mode: str) -> Row:
    """Seconds a step and peak memory: mindone's step against ours."""
    steps = context.timed_steps(SMALL)
    with context.scratch() as folder:
        job = _job(context, SMALL, folder)
        found = _measure(job, folder, context.rounds, steps, mode)
        memory = {
            side: _measure(job, folder, 1, 2, mode, side)["memory_bytes"]
            for side in ("theirs", "ours")
        }
    ratios = {name: found["ratio"]["median"], f"{name}_memory": memory["theirs"] / memory["ours"]}
    more = {"memory_bytes": memory["ours"], "peer_memory_bytes": memory["theirs"]}
    unet = inputs.count_parameters(context.ready(SMALL).model)
    return Row(name, ratios, {**found, **more, "unet_parameters": unet, "batch": SMALL.batch})


def memory_row(context: Context, name: str) -> Row:
    """Peak memory on so many pictures over that on ten times as many: of our loop, and of mindone's
    step with its dataset in memory."""
    figures: dict[str, Any] = {}
    ratios = {}
    for side in ("", "peer_"):
        few, many = (_peak(context, scale, theirs=bool(side)) for scale in (SMALL, TENFOLD))
        ratios[f"{side}{name}"] = few / many
        for scale, peak in ((SMALL, few), (TENFOLD, many)):
            figures[f"{side}memory_bytes_{scale.pictures}_pictures"] = peak
    return Row(name, ratios, figures)


def _peak(context: Context, scale: Scale, *, theirs: bool) -> int:
    with context.scratch() as folder:
        job = _job(context, scale, folder, steps=EPOCH)
        if theirs:
            found = _measure(job, folder, 1, 2, "pynative", "theirs")  # all is there at once
            return int(found["memory_bytes"])
        return ours.time_loop(job).memory_bytes


def _if_there(make: Callable[[Context, str], Row]) -> Callable[[Context, str], Row]:
    """The row, left out where the environment is not."""

    def row(context: Context, name: str) -> Row:
        found = probe_runtime("mindspore")
        return make(context, name) if found.available else Row(name, left_out=found.reason)

    return row


#: In graph mode mindone's script trains; operators one by one are what ours does by default.
MINDSPORE_ROWS: dict[str, Callable[[Context, str], Row]] = {
    "step_vs_mindone": _if_there(partial(step_row, mode="graph")),
    "step_vs_mindone_pynative": _if_there(partial(step_row, mode="pynative")),
    "memory_of_a_tenth": _if_there(memory_row),
}
