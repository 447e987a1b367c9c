"""Registers device hpu with PyTorch when it is imported, as Intel's does."""

from typing import Any

import torch
from hpu_emulator import build, graphs


def _register() -> None:
    """torch.hpu, which must be there before the first tensor."""
    from device_emulator.device import emulate

    def memory_stats(device: Any = None) -> dict[str, int]:
        in_use, most = build.load().memory(0)
        return {"Limit": 96 * 2**30, "InUse": in_use, "MaxInUse": most}

    emulate(
        "hpu",
        1,
        device_count=lambda: 8,  # of the host; a process has one
        get_device_name=lambda device=None: "GAUDI2 (emulated)",
        memory_stats=memory_stats,
    )
    build.load().set_lazy(graphs.lazy())


def _hpu_backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """Of torch.compile: the traced graph as it is, recorded by its code and its shapes."""
    shapes = tuple(tuple(i.shape) if isinstance(i, torch.Tensor) else i for i in inputs)
    graphs.record(("torch.compile", graph.code, str(shapes)))
    return graph.forward


_register()
if not graphs.lazy():
    torch._dynamo.register_backend(_hpu_backend, "hpu_backend")
