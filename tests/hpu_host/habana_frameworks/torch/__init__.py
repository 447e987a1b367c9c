"""Registers device hpu with PyTorch when it is imported, as Intel's does."""

import contextlib
import sys
from types import ModuleType
from typing import Any

import torch
from hpu_emulator import graphs


def _register() -> ModuleType:
    """torch.hpu, which must be there before the first tensor."""
    from hpu_emulator import build

    hpu = ModuleType("torch.hpu")
    sys.modules["torch.hpu"] = hpu
    torch._register_device_module("hpu", hpu)
    extension = build.load()
    extension.set_lazy(graphs.lazy())

    class Stream:
        def __init__(self, *given: Any, **more: Any) -> None:
            pass

        def synchronize(self) -> None:
            pass

        def wait_stream(self, other: Any) -> None:
            pass

    class Event(Stream):
        pass

    def memory_stats(device: Any = None) -> dict[str, int]:
        counts = extension.counts()
        return {"Limit": 96 * 2**30, "InUse": counts["allocated"], "MaxInUse": counts["peak"]}

    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    hpu.__dict__.update(
        Event=Event,
        Stream=Stream,
        current_device=lambda: 0,
        current_stream=lambda device=None: Stream(),
        default_stream=lambda device=None: Stream(),
        device=lambda device: contextlib.nullcontext(),
        device_count=lambda: 8,  # of the host; a process has one
        empty_cache=lambda: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        get_device_name=lambda device=None: "GAUDI2 (emulated)",
        get_rng_state=get_rng_state,
        init=lambda: None,
        is_available=lambda: True,
        is_bf16_supported=lambda: True,
        is_initialized=lambda: True,
        manual_seed=lambda seed: None,  # numbers are the CPU's, whose seed is set beside
        manual_seed_all=lambda seed: None,
        max_memory_allocated=lambda device=None: extension.counts()["peak"],
        memory_allocated=lambda device=None: extension.counts()["allocated"],
        memory_stats=memory_stats,
        reset_peak_memory_stats=lambda device=None: extension.forget_peak(),
        set_device=lambda device: None,
        set_rng_state=set_rng_state,
        stream=lambda stream: contextlib.nullcontext(),
        synchronize=lambda device=None: None,
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
    )
    return hpu


def _hpu_backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """Of torch.compile: the traced graph as it is, recorded by its code and its shapes."""
    shapes = tuple(tuple(i.shape) if isinstance(i, torch.Tensor) else i for i in inputs)
    graphs.record(("torch.compile", graph.code, str(shapes)))
    return graph.forward


_register()
if not graphs.lazy():
    torch._dynamo.register_backend(_hpu_backend, "hpu_backend")
