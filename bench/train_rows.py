"""The rows of `bench.train`. Rows for CUDA train SD2-base and SDXL at full size, in bf16."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench import benchmark_inputs, report, run_kilnworks
from bench.report import Row, Skip, spread
from bench.run_diffusers_scripts import SCRIPTS
from bench.training_step_workloads import COMMON, OURS, Context, Workload, loop_figures, step_row
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

SD2_CONFIGS = benchmark_inputs.MODELS / "stable-diffusion-2-base"
SDXL_CONFIGS = benchmark_inputs.MODELS / "stable-diffusion-xl-base-1.0"
BF16: dict[str, Any] = {"mixed_precision": "bf16"}  # a setting and an option of the scripts
LARGE_MEMORY = 120 * 2**30  # bytes of device memory; from here on the batch size is doubled


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
        result = report.run_module("bench.job_steps", "losses", str(job), str(record))
    differences = {what: result[f"max_relative_{what}_difference"] for what in EQUAL_WITHIN}
    # NaN is not within any bound.
    wrong = [what for what, bound in EQUAL_WITHIN.items() if not differences[what] <= bound]
    failed = "; ".join(f"{what} differs by {differences[what]:.2g}" for what in wrong)
    return Row(name, figures=result, failed=failed)


def overhead_row(context: Context, name: str, *, workload: Workload) -> Row:
    """Seconds of a bare step over seconds of a step of the loop."""
    with context.scratch() as folder:
        job = folder / "job.json"
        write_job(context.job(workload, "full", folder), job)
        counts = (str(context.rounds), str(context.timed_steps(workload)))
        result = report.run_module("bench.job_steps", "overhead", str(job), *counts)
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


@cache
def sd2(batch: int) -> Workload:
    """Stable Diffusion 2 base, 512 x 512."""
    write = partial(benchmark_inputs.write_full_size, model=SD2_CONFIGS)
    return Workload("sd2", write, 256, 512, batch, family="sd", train=BF16, peer=BF16)


@cache
def sdxl(batch: int) -> Workload:
    """Stable Diffusion XL, 1024 x 1024."""
    write = partial(benchmark_inputs.write_full_size, model=SDXL_CONFIGS)
    return Workload("sdxl", write, 64, 1024, batch, train=BF16, peer=BF16)


def cuda_row(
    context: Context, name: str, *, workload: Callable[[int], Workload], batch: int, method: str
) -> Row:
    """Images/s, MFU and peak memory, also of the script if it exists."""
    _require_cuda()
    return full_size_row(context, name, workload(batch_size(batch)), method)


def _require_cuda() -> None:
    """Raise Skip without a CUDA device."""
    import torch

    if not torch.cuda.is_available():
        raise Skip("no CUDA device")


def batch_size(batch: int) -> int:
    """Twice the batch size on devices with LARGE_MEMORY."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
    return 2 * batch if total >= LARGE_MEMORY else batch


def full_size_row(context: Context, name: str, workload: Workload, method: str) -> Row:
    """The same on any device."""
    try:
        row = step_row(context, name, workload=workload, method=method)
    except Skip as reason:
        (times,) = context.alternate(
            lambda folder: run_kilnworks.time_loop(context.job(workload, method, folder))
        )
        row = Row(name, figures=loop_figures(times) | {"peer": f"skipped: {reason}"})
    row.figures["batch"] = workload.batch
    return row


def cuda_jax_row(
    context: Context, name: str, *, workload: Callable[[int], Workload], batch: int
) -> Row:
    """Images/s, MFU and peak memory of runtimes jax and torch."""
    _require_cuda()
    if not any(find_spec(plugin) for plugin in ("jax_cuda12_plugin", "jax_cuda13_plugin")):
        raise Skip("jax has no CUDA plug-in: see docs/tpu.md")
    return two_runtimes_row(context, name, workload(batch_size(batch)))


def two_runtimes_row(context: Context, name: str, workload: Workload) -> Row:
    """The same on any device."""

    def time_by(runtime: str) -> Callable[[Path], run_kilnworks.LoopTime]:
        return lambda folder: run_kilnworks.time_loop(
            replace(context.job(workload, "full", folder), runtime=runtime)
        )

    of_torch, of_jax = context.alternate(time_by("torch"), time_by("jax"))
    pairs = zip(of_torch, of_jax, strict=True)
    ratio = spread([torch.seconds / jax.seconds for torch, jax in pairs])
    figures = {"ratio": ratio, "batch": workload.batch, **loop_figures(of_jax)}
    figures |= {f"torch_{name}": value for name, value in loop_figures(of_torch).items()}
    return Row(name, {f"{name}_over_torch": ratio["median"]}, figures)


CUDA_ROWS: dict[str, Callable[[Context, str], Row]] = {
    "cuda_sd2_full": partial(cuda_row, workload=sd2, batch=32, method="full"),
    "cuda_sd2_lora": partial(cuda_row, workload=sd2, batch=32, method="lora"),
    "cuda_sdxl_full": partial(cuda_row, workload=sdxl, batch=4, method="full"),
    "cuda_sdxl_lora": partial(cuda_row, workload=sdxl, batch=4, method="lora"),
    "cuda_sd2_jax": partial(cuda_jax_row, workload=sd2, batch=32),
    "cuda_sdxl_jax": partial(cuda_jax_row, workload=sdxl, batch=4),
}
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
