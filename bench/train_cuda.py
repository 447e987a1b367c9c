"""The rows of `bench.train` that need a CUDA device: the true sizes of SD2-base and SDXL, bf16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench import inputs, ours
from bench.peer import SCRIPTS
from bench.report import Row, spread
from bench.steps import Context, Scale, loop_figures, step_row
from runtimes.process.job import write_job

MODELS = Path(__file__).with_name("models")
SD2_UNET, SDXL_UNET = MODELS / "sd2-base.json", MODELS / "sdxl.json"
BF16: dict[str, Any] = {"mixed_precision": "bf16"}
PEER_BF16: dict[str, Any] = {"mixed_precision": "bf16"}
OPTION_STEPS = 20
LARGE = 120 * 2**30  # bytes of device memory from which batches are doubled


@cache
def sd2(batch: int) -> Scale:
    """Stable Diffusion 2 base, 512 x 512."""
    write = partial(inputs.write_true_size, config=SD2_UNET)
    return Scale("sd2", write, 256, 512, batch, family="sd", train=BF16, peer=PEER_BF16)


@cache
def sdxl(batch: int) -> Scale:
    """Stable Diffusion XL, 1024 x 1024."""
    write = partial(inputs.write_true_size, config=SDXL_UNET)
    return Scale("sdxl", write, 64, 1024, batch, train=BF16, peer=PEER_BF16)


def cuda_row(
    context: Context, name: str, *, scale: Callable[[int], Scale], batch: int, method: str
) -> Row:
    """Images/s, MFU and peak memory; against the script where it is there; options one by one."""
    if reason := _without():
        return Row(name, left_out=reason)
    return true_size_row(context, name, scale(_enlarged(batch)), method)


def _without() -> str:
    """Why these rows cannot be run; nothing if they can."""
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"
    missing = [path.name for path in (SD2_UNET, SDXL_UNET) if not path.is_file()]
    return f"{MODELS} has no {missing[0]}" if missing else ""


def _enlarged(batch: int) -> int:
    import torch

    return 2 * batch if torch.cuda.get_device_properties(0).total_memory >= LARGE else batch


def true_size_row(context: Context, name: str, scale: Scale, method: str) -> Row:
    """The row on whatever device there is."""
    if reason := context.without(SCRIPTS[scale.family, method]):
        times = []
        for _ in range(context.rounds):
            with context.scratch() as folder:
                times.append(ours.time_loop(context.job(scale, method, folder)))
        row = Row(name, figures=loop_figures(times) | {"peer": f"left out: {reason}"})
    else:
        row = step_row(context, name, scale=scale, method=method)
    row.figures["batch"] = scale.batch
    row.figures["options"] = _options(context, scale, method)
    return row


def cuda_jax_row(context: Context, name: str, *, scale: Callable[[int], Scale], batch: int) -> Row:
    """Images/s, MFU and peak memory of runtime jax and of runtime torch, which take turns."""
    if reason := _without():
        return Row(name, left_out=reason)
    if not any(find_spec(plugin) for plugin in ("jax_cuda12_plugin", "jax_cuda13_plugin")):
        return Row(name, left_out="JAX has no CUDA here: docs/jax.md")
    return two_runtimes_row(context, name, scale(_enlarged(batch)))


def two_runtimes_row(context: Context, name: str, scale: Scale) -> Row:
    """The row on whatever device there is."""

    def time_by(runtime: str) -> Callable[[Path], ours.LoopTime]:
        return lambda folder: ours.time_loop(
            replace(context.job(scale, "full", folder), runtime=runtime)
        )

    of_torch, of_jax = context.in_turns(time_by("torch"), time_by("jax"))
    pairs = zip(of_torch, of_jax, strict=True)
    ratio = spread([torch.seconds / jax.seconds for torch, jax in pairs])
    figures = {"ratio": ratio, "batch": scale.batch, **loop_figures(of_jax)}
    figures |= {f"torch_{name}": value for name, value in loop_figures(of_torch).items()}
    return Row(name, {f"{name}_over_torch": ratio["median"]}, figures)


def _options(context: Context, scale: Scale, method: str) -> dict[str, Any]:
    """Images/s with one choice of the runtime changed at a time; in words where that fails."""
    with context.scratch() as folder:
        job = folder / "job.json"
        write_job(context.job(scale, method, folder), job)
        steps = min(OPTION_STEPS, context.timed_steps(scale))
        _, found = ours.run_module("bench.options", str(job), str(context.rounds), str(steps))
    return {
        change: seconds if isinstance(seconds, str) else scale.batch / seconds["median"]
        for change, seconds in found.items()
    }


CUDA_ROWS: dict[str, Callable[[Context, str], Row]] = {
    "cuda_sd2_full": partial(cuda_row, scale=sd2, batch=32, method="full"),
    "cuda_sd2_lora": partial(cuda_row, scale=sd2, batch=32, method="lora"),
    "cuda_sdxl_full": partial(cuda_row, scale=sdxl, batch=4, method="full"),
    "cuda_sdxl_lora": partial(cuda_row, scale=sdxl, batch=4, method="lora"),
    "cuda_sd2_jax": partial(cuda_jax_row, scale=sd2, batch=32),
    "cuda_sdxl_jax": partial(cuda_jax_row, scale=sdxl, batch=4),
}
