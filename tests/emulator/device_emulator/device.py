"""Emulate devices of one kind in this process: real tensors, and what `torch.<kind>` tells."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch

from device_emulator import build


class Stream:
    """Of work that is done at once: nothing is ever waited for."""

    def __init__(self, *given: Any, **more: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or Event()


class Event(Stream):
    """One that has happened."""

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True


def emulate(kind: str, count: int, **more: Any) -> None:
    """Have PyTorch know `count` devices of a kind; once a process, before its first tensor.

    Args:
        kind: hpu; any other name is given to PyTorch's spare dispatch key.
        more: of `torch.<kind>`, beside or in place of what every kind has.
    """
    module = ModuleType(f"torch.{kind}")
    sys.modules[module.__name__] = module
    if kind != "hpu":
        torch.utils.rename_privateuse1_backend(kind)
    torch._register_device_module(kind, module)
    extension = build.load()
    extension.install(kind != "hpu", count)
    if kind != "hpu":
        torch.utils.generate_methods_for_privateuse1_backend()

    def index(device: Any = None) -> int:
        found = device if isinstance(device, int) else device and torch.device(device).index
        return extension.current_device() if found is None else found

    @contextmanager
    def device(given: Any) -> Iterator[None]:
        before = extension.current_device()
        extension.set_device(index(given))
        try:
            yield
        finally:
            extension.set_device(before)

    module.__dict__.update(
        Event=Event,
        Stream=Stream,
        current_device=extension.current_device,
        current_stream=lambda device=None: Stream(),
        default_stream=lambda device=None: Stream(),
        device=device,
        device_count=lambda: count,
        empty_cache=lambda: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        # Numbers are drawn by the CPU's generator.
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        manual_seed=lambda seed: None,  # the CPU's is set beside
        manual_seed_all=lambda seed: None,
        init=lambda: None,
        is_available=lambda: True,
        is_bf16_supported=lambda: True,
        is_initialized=lambda: True,
        max_memory_allocated=lambda device=None: extension.memory(index(device))[1],
        memory_allocated=lambda device=None: extension.memory(index(device))[0],
        reset_peak_memory_stats=lambda device=None: extension.forget_peak(index(device)),
        set_device=lambda device: extension.set_device(index(device)),
        stream=lambda stream: nullcontext(),
        synchronize=lambda device=None: None,
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
    )
    module.__dict__.update(more)
