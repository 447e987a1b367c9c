"""What stands in for each runtime's chips on a machine without them; what conformance is run on."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from runtimes.registry import RUNTIMES

#: What a Gaudi host has installed, emulated.
HPU_HOST = Path(__file__).with_name("hpu_host")
#: Of XLA: a program that runs for seconds is not worth minutes of a compiler's time.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
#: Variables of a process of a runtime, or of a variant of one.
ENVIRONMENT: dict[str, dict[str, str]] = {
    "hpu-eager": {"PYTHONPATH": str(HPU_HOST), "PT_HPU_LAZY_MODE": "0"},
    "hpu-lazy": {"PYTHONPATH": str(HPU_HOST), "PT_HPU_LAZY_MODE": "1"},
    "jax": {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=4 {QUICK}",
    },
    "xla": {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4", "XLA_FLAGS": QUICK},
}
#: Settings by which one shares a run among several devices.
SEVERAL: dict[str, dict[str, Any]] = {
    "torch": {"processes": 2},
    "jax": {"processes": 2, "mesh": {"fsdp": 2}},  # of eight, four in each
    "xla": {"mesh": {"fsdp": 2}},  # of four, that share each batch
    "mindspore": {"processes": 2},
    "hpu-eager": {"processes": 2},
    "hpu-lazy": {"processes": 2},
}


@dataclass(frozen=True)
class Variant:
    """A runtime on one kind of its devices."""

    runtime: str
    device: str = "cpu"
    settings: dict[str, Any] = field(default_factory=dict)  # of `train`, for it alone
    families: tuple[str, ...] = ("sd", "sdxl", "sd3")  # where a test goes through them


#: What conformance is run on: every runtime, and its other devices. To add one is to add its name.
VARIANTS = {name: Variant(name) for name in RUNTIMES} | {
    "hpu-eager": Variant("torch", "hpu", {"hpu": {"mode": "eager"}}, ("sd",)),
    "hpu-lazy": Variant("torch", "hpu", {"hpu": {"mode": "lazy"}}, ("sdxl",)),
}


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


def why_not(name: str) -> str:
    """What an emulated device lacks here; empty if nothing."""
    if VARIANTS[name].device != "hpu" or shutil.which(os.environ.get("CXX", "g++")):
        return ""
    return "the emulated HPU needs a C++ compiler (g++)"
