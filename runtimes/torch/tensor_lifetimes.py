"""Record which tensors live when, to compute the peak memory of a step for any batch size."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from runtimes.torch.gpu_step_memory_records import KINDS, Moment
from runtimes.torch_models.int8_linear import Int8Linear

_aten: Any = torch.ops.aten
#: Formulas of FLOPs by operator; PyTorch's table lacks the CPU's attention.
FLOPS: dict[Any, Any] = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _aten._scaled_dot_product_flash_attention
    ],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}
ALIGNMENT = 512  # bytes; PyTorch's CUDA allocator rounds sizes up to it
#: Batch sizes whose peak is exact; between them it is interpolated from above.
BATCH_SIZES = (*range(1, 65), *(2**n for n in range(7, 13)))


class LiveMemory(TorchDispatchMode):
    """Within the context, records each storage from its first tensor until it is freed.

    Storages whose size is a multiple of `samples` grow with the batch. `samples` is therefore a
    prime number that divides no size of a weight, such as 13.

    It also counts FLOPs; those of gradient checkpointing's recomputation separately.

    Args:
        samples: the batch size of the recorded step.
    """

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.samples = samples
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}  # storage address -> number
        self._kinds: list[int] = []  # of each storage, by its number
        self._bytes: list[int] = []
        self._events: list[int] = []  # number of the storage; -1 - number: it is freed
        self._constant: set[int] = set()  # addresses of storages that are not recorded
        self.flops = 0
        self.recomputed_flops = 0

    def exclude(self, tensors: Iterable[torch.Tensor]) -> int:
        """Do not record the storages of these tensors; returns their bytes."""
        total = 0
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage._cdata not in self._constant:
                self._constant.add(storage._cdata)
                total += _aligned(storage.nbytes())
        return total

    def mark_gradient(self, parameter: torch.Tensor) -> None:
        """Count a parameter's gradient as such; a hook of `post_accumulate_grad`."""
        assert parameter.grad is not None
        number = self._alive.get(parameter.grad.untyped_storage()._cdata)
        if number is not None:
            self._kinds[number[0]] = KINDS.index("gradients")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        backward = torch._C._current_graph_task_id() != -1
        if func._overloadpacket in FLOPS:
            flops = FLOPS[func._overloadpacket](*args, **kwargs, out_val=out)
            self.flops += flops
            if backward and (torch.is_grad_enabled() or _in_int8_linear()):
                self.recomputed_flops += flops
        forward = not backward and (torch.is_grad_enabled() or _in_int8_linear())
        kind = "activations" if forward else "temporaries"
        if func is torch.ops.aten._to_copy.default:
            source = args[0].untyped_storage()._cdata
            kind = "compute_weights" if source in self._constant else kind
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._record(tensor.untyped_storage(), KINDS.index(kind))
        return out

    def _record(self, storage: Any, kind: int) -> None:
        address = storage._cdata
        if address in self._alive or address in self._constant:
            return
        number = len(self._kinds)
        self._kinds.append(kind)
        self._bytes.append(storage.nbytes())
        self._events.append(number)

        def freed(_: Any) -> None:
            self._alive.pop(address)
            self._events.append(-1 - number)

        self._alive[address] = (number, weakref.ref(storage, freed))

    def moments(self, *, accumulating: bool) -> list[Moment]:
        """The moments with the most live memory, one or more for each of BATCH_SIZES.

        Args:
            accumulating: whether the gradients of an earlier micro-batch exist from the start.
        """
        live = self._live()
        if accumulating:
            # A micro-batch's own gradient exists only until it has been added.
            own = live[:, 0]
            live[:, 0] = own.max(axis=0) + np.maximum(np.diff(own, axis=0, prepend=0), 0)
        fixed, each = live.sum(axis=1).T
        rows = {int(np.argmax(fixed + size * each)) for size in BATCH_SIZES}
        return [
            Moment({kind: (int(f), int(s)) for kind, (f, s) in zip(KINDS, live[row], strict=True)})
            for row in sorted(rows)
        ]

    def _live(self) -> Any:
        """Live memory after each event: [events, kind, (fixed bytes, bytes per sample)]."""
        numbers = np.array(self._events)
        signs = np.where(numbers < 0, -1, 1)
        numbers = np.where(numbers < 0, -1 - numbers, numbers)
        size = np.array(self._bytes)[numbers]
        grows = size % self.samples == 0
        changes = np.zeros((len(numbers), len(KINDS), 2), np.int64)
        rows = np.arange(len(numbers)), np.array(self._kinds)[numbers]
        changes[(*rows, 0)] = signs * np.where(grows, 0, _aligned(size))
        changes[(*rows, 1)] = signs * np.where(grows, size // self.samples, 0)
        return changes.cumsum(axis=0)


def _in_int8_linear() -> bool:
    """Whether an 8-bit layer's forward pass runs; its autograd function disables gradients."""
    frame, code = sys._getframe(), Int8Linear.forward.__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def prime_batch_size(sizes: Iterable[int]) -> int:
    """The smallest prime above 10 that divides none of these sizes."""
    found = list(sizes)
    primes = (n for n in range(11, 1000) if all(n % d for d in range(2, 32) if d < n))
    return next(n for n in primes if all(size % n for size in found))


def _aligned(size: Any) -> Any:
    return -(-size // ALIGNMENT) * ALIGNMENT
