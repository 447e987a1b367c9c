"""The rows of `bench.train` that run on every machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench import benchmark_inputs, run_kilnworks
from bench.report import Row, Skip, spread
from bench.run_diffusers_scripts import SCRIPTS
from bench.train_cuda import CUDA_ROWS
from bench.training_step_workloads import COMMON, OURS, Context, Workload, step_row
from runtimes.process.job import write_job

EQUAL_STEPS = 50
EQUAL_BATCH = 8
#: Largest relative difference of a loss, and of a gradient norm, which sums over all weights.
EQUAL_WITHIN = {"loss": 1e-5, "grad_norm": 1e-4}
TINY = Workload("tiny", benchmark_inputs.write_pipeline, pictures=512, size=32, batch=32)
MIDDLE = Workload(
    "mid",
    partial(benchmark_inputs.write_pipeline, unet=benchmark_inputs.MIDDLE_UNET),
    pictures=128,
    size=64,
    batch=8,
    steps_divisor=4,
)
RUN = replace(TINY, name="run", pictures=1000)
#: The overhead of the loop is measured on steps of 0.2 s: the demo's model on larger pictures.
SHORT = replace(TINY, name="short", pictures=128, size=64, batch=10)


def run_row(context: Context, name: str) -> Row:
    """Seconds of a whole run: from a folder of pictures to saved weights."""
    script = SCRIPTS["sdxl", "full"]
    steps = 5 * context.steps
    peer = context.peer_with(script)
    files = context.files(RUN)

    def theirs(folder: Path) -> float:
        options = {"resolution": RUN.size, "train_batch_size": RUN.batch, **COMMON}
        options["max_train_steps"] = steps
        return peer.run(script, files.model, files.images, folder, **options).seconds

    def mine(folder: Path) -> tuple[float, dict[str, float]]:
        train = {**OURS, "steps": steps, "global_batch_size": RUN.batch}
        return run_kilnworks.whole_run(files.images, files.model, folder, RUN.size, train)

    their, our = context.alternate(theirs, mine)
    ratio = spread([a / b for a, (b, _) in zip(their, our, strict=True)])
    figures = {
        "ratio": ratio,
        "peer_seconds": spread(their),
        "seconds": spread([seconds for seconds, _ in our]),
        **{f"{stage}_seconds": spread([run[stage] for _, run in our]) for stage in our[0][1]},
        "pictures": RUN.pictures,
        "steps": steps,
    }
    return Row(name, {name: ratio["median"]}, figures)


def equal_row(context: Context, name: str) -> Row:
    """Losses and gradient norms of the script and ours on equal inputs; fails if they differ."""
    script = SCRIPTS["sdxl", "full"]
    peer = context.peer_with(script)
    files = context.files(TINY)
    with context.scratch() as folder:
        record = folder / "record"
        job = folder / "job.json"
        record.mkdir()
        options = {"train_batch_size": EQUAL_BATCH, "max_train_steps": EQUAL_STEPS, **COMMON}
        options |= {"resolution": TINY.size, "record": record}
        peer.run(script, files.model, files.images, folder, **options)
        settings = {"steps": EQUAL_STEPS, "global_batch_size": EQUAL_BATCH}
        write_job(context.job(TINY, "full", folder, **settings), job)
        _, result = run_kilnworks.run_module("bench.compare_losses", str(job), str(record))
    found = {what: result[f"max_relative_{what}_difference"] for what in EQUAL_WITHIN}
    # NaN is not within any bound.
    wrong = [what for what, bound in EQUAL_WITHIN.items() if not found[what] <= bound]
    failed = "; ".join(f"{what} differs by {found[what]:.2g}" for what in wrong)
    return Row(name, figures=result, failed=failed)


def overhead_row(context: Context, name: str, *, workload: Workload) -> Row:
    """Seconds of a bare step over seconds of a step of the loop."""
    with context.scratch() as folder:
        job = folder / "job.json"
        rounds = context.rounds
        steps = context.timed_steps(workload)
        write_job(context.job(workload, "full", folder), job)
        _, result = run_kilnworks.run_module("bench.overhead", str(job), str(rounds), str(steps))
    return Row(name, {name: result["ratio"]["median"]}, result)


def jax_row(context: Context, name: str) -> Row:
    """Seconds per step of runtime torch, eager and compiled, over those of runtime jax.

    All run our loop on the CPU, with the same model and batches.
    """
    if find_spec("jax") is None:
        raise Skip("jax is not installed")
    cores = len(os.sched_getaffinity(0))
    if int(os.environ.get("OMP_NUM_THREADS", cores)) != cores:
        raise Skip(f"XLA uses all {cores} cores, OMP_NUM_THREADS does not limit it")

    def seconds(runtime: str, folder: Path, **train: Any) -> float:
        job = context.job(MIDDLE, "full", folder, device="cpu", **train)
        return run_kilnworks.time_loop(replace(job, runtime=runtime)).seconds

    sides = {
        "torch": partial(seconds, "torch"),
        "torch_compile": partial(seconds, "torch", compile="blocks"),
        "jax": partial(seconds, "jax"),
    }
    times = dict(zip(sides, context.alternate(*sides.values()), strict=True))
    over = {
        f"{name}_over_{side}": spread(
            [a / b for a, b in zip(times[side], times["jax"], strict=True)]
        )
        for side in ("torch", "torch_compile")
    }
    figures = {f"{side}_seconds": spread(values) for side, values in times.items()}
    ratios = {ratio: values["median"] for ratio, values in over.items()}
    return Row(name, ratios, {**over, **figures})


ROWS: dict[str, Callable[[Context, str], Row]] = {
    "step_vs_diffusers_full": partial(step_row, workload=TINY, method="full"),
    "step_vs_diffusers_lora": partial(step_row, workload=TINY, method="lora"),
    "step_vs_diffusers_full_mid": partial(step_row, workload=MIDDLE, method="full"),
    "step_vs_diffusers_lora_mid": partial(step_row, workload=MIDDLE, method="lora"),
    "run_vs_diffusers": run_row,
    "equal_losses": equal_row,
    "bare_over_loop": partial(overhead_row, workload=SHORT),
    "bare_over_loop_tiny": partial(overhead_row, workload=TINY),
    "jax": jax_row,
    **CUDA_ROWS,
}
