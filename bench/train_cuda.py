"""The rows of `bench.train` that require a CUDA device: SD2-base and SDXL at full size, bf16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench import benchmark_inputs, run_kilnworks
from bench.report import Row, Skip, spread
from bench.training_step_workloads import Context, Workload, loop_figures, step_row

MODELS = Path(__file__).with_name("models")
SD2_UNET = MODELS / "sd2-base.json"
SDXL_UNET = MODELS / "sdxl.json"
BF16: dict[str, Any] = {"mixed_precision": "bf16"}  # a setting and an option of the scripts
LARGE_MEMORY = 120 * 2**30  # bytes of device memory; from here on the batch size is doubled


@cache
def sd2(batch: int) -> Workload:
    """Stable Diffusion 2 base, 512 x 512."""
    write = partial(benchmark_inputs.write_full_size, config=SD2_UNET)
    return Workload("sd2", write, 256, 512, batch, family="sd", train=BF16, peer=BF16)


@cache
def sdxl(batch: int) -> Workload:
    """Stable Diffusion XL, 1024 x 1024."""
    write = partial(benchmark_inputs.write_full_size, config=SDXL_UNET)
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
        raise Skip("jax has no CUDA plug-in: see docs/jax.md")
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
