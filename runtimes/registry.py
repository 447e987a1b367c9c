"""The table of runtimes, and functions that open or query one. A new runtime is a row here."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from runtimes.contract import Pipeline, PipelineEncoder, Runtime, WrongInput
from runtimes.objective.scheduler_config import TABULATED
from runtimes.process.job import EncodeJob, GenerateJob, Job, TrainJob


@dataclass(frozen=True)
class RuntimeSpec:
    """A runtime's package, environment and limits."""

    #: Contains `runtime.TheRuntime`, `generate.ThePipeline`, `encoder.open_encoder`, `device.probe`
    #: and `device.check`.
    #: `device` must import quickly.
    package: str
    needs: tuple[str, ...]  # packages that must be installed
    environment: str | None = None  # suffix of its virtual environment's folder; None: ours
    schedulers: tuple[str, ...] | None = None  # supported scheduler classes; None: all of diffusers
    #: Whether one process locks the device: the encoder process must end before training starts.
    exclusive: bool = False
    denoisers: tuple[str, ...] | None = None  # supported denoiser classes; None: all
    uses_all_devices: bool = False  # whether one process shares batches among all devices


RUNTIMES = {
    "torch": RuntimeSpec("runtimes.torch", ("torch", "diffusers", "transformers", "safetensors")),
    "jax": RuntimeSpec(
        "runtimes.jax",
        ("jax", "torchax", "diffusers"),
        exclusive=True,
        schedulers=TABULATED,
        uses_all_devices=True,
    ),
    "xla": RuntimeSpec(
        "runtimes.xla", ("torch_xla",), "-xla", schedulers=TABULATED, uses_all_devices=True
    ),
    "mindspore": RuntimeSpec(
        "runtimes.mindspore",
        ("mindspore", "mindone"),
        environment="-mindspore",
        denoisers=("UNet2DConditionModel",),
    ),
}


def open_runtime(name: str) -> Runtime:
    """A new runtime. Raises WrongInput if the name is unknown or an import fails."""
    return cast(Runtime, import_from(name, "runtime").TheRuntime())


def open_pipeline(job: GenerateJob) -> Pipeline:
    """The pipeline that generates a job's images. Raises WrongInput."""
    prepare(job)
    return cast(Pipeline, import_from(job.runtime, "generate").ThePipeline(job))


def prepare(job: Job | EncodeJob) -> None:
    """Load Habana's bridge if the job needs it. Call it before any import of PyTorch code.

    PyTorch caches the list of accelerators at the first query, so the bridge must load first.

    Raises:
        WrongInput: the bridge cannot be loaded.
    """
    device = job.train.get("device", "auto") if isinstance(job, TrainJob) else job.device
    if device.partition(":")[0] == "hpu" and job.runtime == "torch":
        import_from(job.runtime, "device").prepare(job)


def open_encoder(job: EncodeJob) -> PipelineEncoder:
    """Load a pipeline's encoders in this process. Raises WrongInput."""
    prepare(job)
    return cast(PipelineEncoder, import_from(job.runtime, "encoder").open_encoder(job))


def uses_tabulated_scheduler(name: str) -> bool:
    """Whether a runtime samples from tabulated coefficients (sample/tabulated_schedulers.py)."""
    return spec_of(name).schedulers == TABULATED


def interpreter(name: str) -> str:
    """Path of the Python interpreter that runs a runtime's processes.

    Raises:
        WrongInput: the runtime is unknown, or its environment is not installed.
    """
    environment = spec_of(name).environment
    if environment is None or sys.prefix.endswith(environment):
        return sys.executable
    python = Path(sys.prefix + environment, "bin/python")
    if not python.is_file():
        raise WrongInput(f"runtime {name} needs its own environment: run `make setup-{name}`")
    return str(python)


def has_own_environment(name: str) -> bool:
    """Whether a runtime needs another virtual environment than this process's."""
    return interpreter(name) != sys.executable


def encodes_in_subprocess(job: EncodeJob) -> bool:
    """Whether the encoders need a subprocess: for another environment, or to release the device.

    A process that has opened a Gaudi locks it as well.
    """
    exclusive = spec_of(job.runtime).exclusive or job.device.startswith("hpu")
    return exclusive or has_own_environment(job.runtime)


def spec_of(name: str) -> RuntimeSpec:
    if name not in RUNTIMES:
        raise WrongInput(f"runtime {name!r} is not known here (known: {', '.join(RUNTIMES)})")
    return RUNTIMES[name]


def import_from(name: str, module: str) -> Any:
    try:
        return import_module(f"{spec_of(name).package}.{module}")
    except ImportError as error:
        raise WrongInput(
            f"runtime {name} cannot be imported in this environment: {error}"
        ) from None
