"""The rows of `bench.train` that every machine can run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench import inputs, ours
from bench.peer import SCRIPTS
from bench.report import Row, spread
from bench.steps import COMMON, OURS, Context, Scale, step_row
from bench.train_cuda import CUDA_ROWS
from runtimes.process.job import write_job

EQUAL_STEPS, EQUAL_BATCH, EQUAL_WITHIN = 50, 8, 1e-5
TINY = Scale("tiny", inputs.write_pipeline, pictures=512, size=32, batch=32)
MIDDLE = Scale(
    "mid",
    partial(inputs.write_pipeline, unet=inputs.MIDDLE_UNET),
    pictures=128,
    size=64,
    batch=8,
    part=4,
)
RUN = replace(TINY, name="run", pictures=1000)
#: The loop's cost is asked for on a step of 0.2 s: the demo's model on larger pictures.
SHORT = replace(TINY, name="short", pictures=128, size=64, batch=10)


def run_row(context: Context, name: str) -> Row:
    """Seconds of a whole run: from a folder of pictures to saved weights."""
    script = SCRIPTS["sdxl", "full"]
    if reason := context.without(script):
        return Row(name, left_out=reason)
    peer, steps, ready = context.peer, 5 * context.steps, context.ready(RUN)
    assert peer is not None

    def theirs(folder: Path) -> float:
        options = {"resolution": RUN.size, "train_batch_size": RUN.batch, **COMMON}
        ended = peer.run(
            script, ready.model, ready.images, folder, max_train_steps=steps, **options
        )
        return ended.seconds

    def mine(folder: Path) -> tuple[float, dict[str, float]]:
        train = {**OURS, "steps": steps, "global_batch_size": RUN.batch}
        return ours.whole_run(ready.images, ready.model, folder, RUN.size, train)

    their, our = context.in_turns(theirs, mine)
    ratio = spread([a / b for a, (b, _) in zip(their, our, strict=True)])
    figures = {
        "ratio": ratio,
        "peer_seconds": spread(their),
        "seconds": spread([seconds for seconds, _ in our]),
        **{f"{stage}_seconds": spread([by[stage] for _, by in our]) for stage in our[0][1]},
        "pictures": RUN.pictures,
        "steps": steps,
    }
    return Row(name, {name: ratio["median"]}, figures)


def equal_row(context: Context, name: str) -> Row:
    """The script's losses against ours on the same draws; fails if they are too far apart."""
    script = SCRIPTS["sdxl", "full"]
    if reason := context.without(script):
        return Row(name, left_out=reason)
    peer, ready = context.peer, context.ready(TINY)
    assert peer is not None
    with context.scratch() as folder:
        record, job = folder / "record", folder / "job.json"
        record.mkdir()
        options = {"train_batch_size": EQUAL_BATCH, "max_train_steps": EQUAL_STEPS, **COMMON}
        options |= {"resolution": TINY.size, "record": record}
        peer.run(script, ready.model, ready.images, folder, **options)
        settings = {"steps": EQUAL_STEPS, "global_batch_size": EQUAL_BATCH}
        write_job(context.job(TINY, "full", folder, **settings), job)
        _, found = ours.run_module("bench.equal", str(job), str(record))
    difference = found["max_relative_loss_difference"]
    failed = f"losses differ by {difference:.2g}" if difference > EQUAL_WITHIN else ""
    return Row(name, figures=found, failed=failed)


def overhead_row(context: Context, name: str, *, scale: Scale) -> Row:
    """A bare step's seconds over those of a step of the loop."""
    with context.scratch() as folder:
        job, rounds, steps = folder / "job.json", context.rounds, context.timed_steps(scale)
        write_job(context.job(scale, "full", folder), job)
        _, found = ours.run_module("bench.overhead", str(job), str(rounds), str(steps))
    return Row(name, {name: found["ratio"]["median"]}, found)


def jax_row(context: Context, name: str) -> Row:
    """Seconds of a step of runtime torch, eager and compiled, over those of runtime jax: the same
    model, batches and CPU, all through our loop.
    """
    if find_spec("jax") is None:
        return Row(name, left_out="jax is not installed here")
    cores = len(os.sched_getaffinity(0))
    if int(os.environ.get("OMP_NUM_THREADS", cores)) != cores:
        return Row(name, left_out=f"XLA takes all {cores} cores, whatever OMP_NUM_THREADS says")
    sides: dict[str, dict[str, Any]] = {
        "torch": {},
        "torch_compile": {"compile": True},
        "jax": {},
    }
    times: dict[str, list[ours.LoopTime]] = {side: [] for side in sides}
    for number in range(context.rounds):
        order = list(sides)[number % 3 :] + list(sides)[: number % 3]
        for side in order:
            with context.scratch() as folder:
                job = context.job(MIDDLE, "full", folder, device="cpu", **sides[side])
                job = replace(job, runtime=side.partition("_")[0])
                times[side].append(ours.time_loop(job))
    seconds = {side: [time.seconds for time in found] for side, found in times.items()}
    over = {
        f"{name}_over_{side}": spread(
            [a / b for a, b in zip(seconds[side], seconds["jax"], strict=True)]
        )
        for side in ("torch", "torch_compile")
    }
    figures = {f"{side}_seconds": spread(found) for side, found in seconds.items()}
    ratios = {ratio: values["median"] for ratio, values in over.items()}
    return Row(name, ratios, {**over, **figures})


ROWS: dict[str, Callable[[Context, str], Row]] = {
    "step_vs_diffusers_full": partial(step_row, scale=TINY, method="full"),
    "step_vs_diffusers_lora": partial(step_row, scale=TINY, method="lora"),
    "step_vs_diffusers_full_mid": partial(step_row, scale=MIDDLE, method="full"),
    "step_vs_diffusers_lora_mid": partial(step_row, scale=MIDDLE, method="lora"),
    "run_vs_diffusers": run_row,
    "equal_losses": equal_row,
    "bare_over_loop": partial(overhead_row, scale=SHORT),
    "bare_over_loop_tiny": partial(overhead_row, scale=TINY),
    "jax": jax_row,
    **CUDA_ROWS,
}
