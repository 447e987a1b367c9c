"""What stands in for each runtime's chips on a machine without them."""

from typing import Any

#: Variables of a runtime's process.
ENVIRONMENT: dict[str, dict[str, str]] = {
    "xla": {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": "4",
        # A program that runs for seconds is not worth minutes of a compiler's time.
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    },
}
#: Settings by which a runtime shares a run among several devices.
SEVERAL: dict[str, dict[str, Any]] = {
    "torch": {"processes": 2},
    "xla": {"mesh": {"fsdp": 2}},  # of four, that share each batch
}
