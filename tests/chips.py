"""Emulated chips for machines without them, and the selection of runtimes to test."""

import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from runtimes.registry import probe_runtime

#: Environment variable: runtimes to test, separated by spaces; unset: all.
SELECTED = "KILN_RUNTIMES"
#: Environment variable: runtimes and devices whose tests fail, not skip, if they cannot run.
MUST_RUN = "KILN_MUST_RUN"

#: Emulated software of a Gaudi host.
HPU_HOST = Path(__file__).with_name("hpu_host")
#: Emulated PyTorch software of an Ascend host.
NPU_HOST = Path(__file__).with_name("npu_host")
#: Operators that MindSpore has on Ascend alone, for its CPU backend.
MINDSPORE_HOST = Path(__file__).with_name("mindspore_host")
#: XLA flags for fast compilation, because the programs run for seconds only. The MLIR fusion
#: emitters take 50% longer to compile.
FAST_COMPILATION = " ".join(
    (
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_use_fusion_emitters=false",
    )
)
#: Environment variables of the processes of a runtime or variant.
ENVIRONMENT: dict[str, dict[str, str]] = {
    "hpu-eager": {"PYTHONPATH": str(HPU_HOST), "PT_HPU_LAZY_MODE": "0"},
    "hpu-lazy": {"PYTHONPATH": str(HPU_HOST), "PT_HPU_LAZY_MODE": "1"},
    "npu": {"PYTHONPATH": str(NPU_HOST)},
    "mindspore": {"PYTHONPATH": str(MINDSPORE_HOST)},
    "jax": {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=4 {FAST_COMPILATION}",
    },
    "xla": {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4", "XLA_FLAGS": FAST_COMPILATION},
}
#: Train settings of a run with several processes.
MULTI_PROCESS: dict[str, dict[str, Any]] = {
    "torch": {"processes": 2},
    "jax": {"processes": 2, "fsdp": 2},  # eight devices, four per process
    "mindspore": {"processes": 2},
    "hpu-eager": {"processes": 2},
    "hpu-lazy": {"processes": 2},
    "npu": {"processes": 2},
}


@dataclass(frozen=True)
class Variant:
    """A runtime on one kind of its devices."""

    runtime: str
    device: str = "cpu"
    settings: dict[str, Any] = field(default_factory=dict)  # of `train`, for this variant only
    families: tuple[str, ...] = ("sdxl",)  # model families of parametrized tests
    more_families: tuple[str, ...] = ()  # model families of `make soak` only


#: Families whose text encoder is an LLM. Tests of each family are in `make test`.
LLM_FAMILIES = ("flux2", "z_image", "qwen_image")
#: Variants of the conformance tests.
VARIANTS = {
    "torch": Variant("torch", families=("sdxl", "sd", "sd3", "flux"), more_families=LLM_FAMILIES),
    "jax": Variant("jax", more_families=("sd", "sd3", "flux", *LLM_FAMILIES)),
    # Four devices: two groups of two; FSDP shards arrays in a group, groups split the batch.
    "xla": Variant("xla", settings={"fsdp": 2}, more_families=("sd", "sd3", "flux", *LLM_FAMILIES)),
    "mindspore": Variant("mindspore", more_families=("sd",)),
    "hpu-eager": Variant("torch", "hpu", {"hpu": {"mode": "eager"}}, ("sd",)),
    "hpu-lazy": Variant("torch", "hpu", {"hpu": {"mode": "lazy"}}),
    # The emulated device has no complex views, which z_image and qwen_image need.
    "npu": Variant("torch", "npu", more_families=("flux", "flux2")),
    "cuda": Variant(
        "torch",
        "cuda",
        {"deterministic": True},
        families=("sdxl", "sd", "sd3", "flux"),
        more_families=LLM_FAMILIES,
    ),
}
#: Devices without an emulation: their tests require a real one.
REAL_ONLY = ("cuda",)


@contextmanager
def standing_in(name: str) -> Iterator[None]:
    """Set the environment variables of a runtime or variant for processes started within."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in ENVIRONMENT.get(name, {}).items():
            if variable == "PYTHONPATH":
                patch.setenv(variable, value, prepend=":")
            else:
                patch.setenv(variable, value)
        yield


def reason_to_skip(variant: str) -> str:
    """Why tests of a variant are skipped; empty if they run.

    A variant in MUST_RUN is not skipped for missing software: its tests run, and fail.
    """
    on = VARIANTS[variant]
    required = (on.runtime if on.device == "cpu" else on.device) in _must_run()
    excluded = not_selected(variant) or excluded_by_cuda(variant)
    return excluded or ("" if required else _missing(variant))


def require(variant: str) -> None:
    """Skip the calling test if a variant is not tested on this machine."""
    if reason := reason_to_skip(variant):
        pytest.skip(reason)


def not_selected(variant: str) -> str:
    """Why a variant is not selected; empty if it is."""
    selected = os.environ.get(SELECTED)
    if selected is None or VARIANTS[variant].runtime in selected.split():
        return ""
    return f"{SELECTED} is {selected!r}"


def excluded_by_cuda(variant: str) -> str:
    """Why a CUDA build of PyTorch excludes a variant; empty if it does not.

    PyTorch refuses two accelerators in one process, and HPU has a dispatch key of its own.
    """
    if VARIANTS[variant].device != "hpu" or cuda_of_pytorch() is None:
        return ""
    return f"PyTorch is built for CUDA {cuda_of_pytorch()}, which excludes the emulated HPU"


def cuda_of_pytorch() -> str | None:
    """CUDA's version that PyTorch is built for; None: a CPU build."""
    import torch  # unit tests do not need it

    return torch.version.cuda


def importorskip(name: str) -> Any:
    """pytest.importorskip, but a package in MUST_RUN fails instead of skipping."""
    return import_module(name) if name in _must_run() else pytest.importorskip(name)


def unless_required(name: str, reason: str) -> str:
    """Return the reason why tests cannot run, if any; fail the test if `name` is in MUST_RUN."""
    if reason and name in _must_run():
        pytest.fail(f"{name} must run (see {MUST_RUN}): {reason}", pytrace=False)
    return reason


def _must_run() -> list[str]:
    return os.environ.get(MUST_RUN, "").split()


@cache
def _missing(variant: str) -> str:
    """What a variant needs and this machine does not have; empty if nothing."""
    if reason := missing_for_emulation(variant):
        return reason
    on = VARIANTS[variant]
    with standing_in(variant):
        found = probe_runtime(on.runtime)
    if not found.available:
        return found.reason
    if on.device in REAL_ONLY and not any(name.startswith(on.device) for name in found.devices):
        return f"no device {on.device}"
    return ""


def missing_for_emulation(name: str) -> str:
    """What an emulated device needs and this machine does not have; empty if nothing."""
    if VARIANTS[name].device in ("cpu", *REAL_ONLY):
        return ""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "an emulated device needs a C++ compiler (g++)"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return "" if header.is_file() else f"an emulated device needs Python's headers ({header})"
