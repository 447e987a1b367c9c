"""What stands in for each runtime's chips on a machine without them; which runtimes are tested."""

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

#: A variable: the runtimes whose tests are run, separated by spaces. Unset, all are.
CHOSEN = "KILN_RUNTIMES"
#: A variable: runtimes and devices whose tests fail, and are not skipped, where they cannot run.
MUST_RUN = "KILN_MUST_RUN"

#: What a Gaudi host has installed, emulated.
HPU_HOST = Path(__file__).with_name("hpu_host")
#: What an Ascend host has for PyTorch, emulated.
NPU_HOST = Path(__file__).with_name("npu_host")
#: Of XLA: a program that runs for seconds is not worth minutes of a compiler's time. Its newer way
#: to fuse operators, by MLIR, takes it half as long again.
QUICK = " ".join(
    (
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_use_fusion_emitters=false",
    )
)
#: Variables of a process of a runtime, or of a variant of one.
ENVIRONMENT: dict[str, dict[str, str]] = {
    "hpu-eager": {"PYTHONPATH": str(HPU_HOST), "PT_HPU_LAZY_MODE": "0"},
    "hpu-lazy": {"PYTHONPATH": str(HPU_HOST), "PT_HPU_LAZY_MODE": "1"},
    "npu": {"PYTHONPATH": str(NPU_HOST)},
    "jax": {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=4 {QUICK}",
    },
    "xla": {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4", "XLA_FLAGS": QUICK},
}
#: Settings by which several processes share a run.
SEVERAL: dict[str, dict[str, Any]] = {
    "torch": {"processes": 2},
    "jax": {"processes": 2, "fsdp": 2},  # of eight, four in each
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
    settings: dict[str, Any] = field(default_factory=dict)  # of `train`, for it alone
    families: tuple[str, ...] = ("sdxl",)  # of models, where a test goes through them
    more_families: tuple[str, ...] = ()  # those that only `make soak` goes through


#: What conformance is run on: every runtime, and its other devices.
VARIANTS = {
    "torch": Variant("torch", families=("sdxl", "sd", "sd3")),
    "jax": Variant("jax", more_families=("sd", "sd3")),
    # Of four devices, two share each array, and both pairs each batch.
    "xla": Variant("xla", settings={"fsdp": 2}, more_families=("sd", "sd3")),
    "mindspore": Variant("mindspore", more_families=("sd",)),
    "hpu-eager": Variant("torch", "hpu", {"hpu": {"mode": "eager"}}, ("sd",)),
    "hpu-lazy": Variant("torch", "hpu", {"hpu": {"mode": "lazy"}}),
    "npu": Variant("torch", "npu"),
    "cuda": Variant("torch", "cuda", families=("sdxl", "sd", "sd3")),
}
#: Devices that nothing stands in for: their tests run on a machine that has one.
REAL_ONLY = ("cuda",)


@contextmanager
def standing_in(name: str) -> Iterator[None]:
    """Within, processes that are started are as those of a runtime, or a variant, are to be."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in ENVIRONMENT.get(name, {}).items():
            if variable == "PYTHONPATH":
                patch.setenv(variable, value, prepend=":")
            else:
                patch.setenv(variable, value)
        yield


def reason_to_skip(variant: str) -> str:
    """Why tests of a variant are skipped here; empty if they run.

    What must run is not asked for what it lacks: its tests run, and fail if it cannot."""
    on = VARIANTS[variant]
    required = (on.runtime if on.device == "cpu" else on.device) in _must_run()
    return not_chosen(variant) or ("" if required else _lacking(variant))


def require(variant: str) -> None:
    """Skip the test that calls this if a variant is not tested here."""
    if reason := reason_to_skip(variant):
        pytest.skip(reason)


def not_chosen(variant: str) -> str:
    """Why a variant is no part of this session; empty if it is one."""
    chosen = os.environ.get(CHOSEN)
    if chosen is None or VARIANTS[variant].runtime in chosen.split():
        return ""
    return f"{CHOSEN} is {chosen!r}"


def importorskip(name: str) -> Any:
    """As pytest's, but what must run fails where it cannot be imported."""
    return import_module(name) if name in _must_run() else pytest.importorskip(name)


def unless_required(name: str, reason: str) -> str:
    """The reason for which tests cannot run, if any. Fails the test if they must."""
    if reason and name in _must_run():
        pytest.fail(f"{name} must run (see {MUST_RUN}): {reason}", pytrace=False)
    return reason


def _must_run() -> list[str]:
    return os.environ.get(MUST_RUN, "").split()


@cache
def _lacking(variant: str) -> str:
    """What a variant lacks on this machine; empty if nothing."""
    if reason := why_not(variant):
        return reason
    on = VARIANTS[variant]
    found = probe_runtime(on.runtime)
    if not found.available:
        return found.reason
    if on.device in REAL_ONLY and not any(name.startswith(on.device) for name in found.devices):
        return f"no device {on.device}"
    return ""


def why_not(name: str) -> str:
    """What an emulated device lacks here; empty if nothing."""
    if VARIANTS[name].device in ("cpu", *REAL_ONLY):
        return ""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "an emulated device needs a C++ compiler (g++)"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return "" if header.is_file() else f"an emulated device needs Python's headers ({header})"
