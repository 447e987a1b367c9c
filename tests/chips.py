"""What stands in for each runtime's chips on a machine without them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

#: Of XLA: a program that runs for seconds is not worth minutes of a compiler's time.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
#: Variables of a runtime's process.
ENVIRONMENT: dict[str, dict[str, str]] = {
    "jax": {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=4 {QUICK}",
    },
    "xla": {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4", "XLA_FLAGS": QUICK},
}
#: Settings by which a runtime shares a run among several devices.
SEVERAL: dict[str, dict[str, Any]] = {
    "torch": {"processes": 2},
    "jax": {"processes": 2, "mesh": {"fsdp": 2}},  # of eight, four in each
    "xla": {"mesh": {"fsdp": 2}},  # of four, that share each batch
    "mindspore": {"processes": 2},
}


@contextmanager
def standing_in(runtime: str) -> Iterator[None]:
    """Within, processes that are started are as those of a runtime are to be."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.get(runtime, {}).items():
            patch.setenv(name, value)
        yield
