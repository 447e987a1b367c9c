"""Frozen transformer blocks in pinned host memory, copied ahead to two buffers on the device.

While a block computes, the next one is copied on a stream of its own: upwards in the forward pass,
downwards in the backward pass, which recomputes blocks (`train.gradient_checkpointing: blocks`).
Frozen weights do not change, so nothing is copied back. Adapters stay on the device.

A block's weights are always in the same buffer: parameters are views of it, and PyTorch raises an
error if a backward pass reads one that another block has replaced.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from configs.errors import Refused
from runtimes.torch_models.network import Network
from runtimes.torch_models.offload import aligned

ALIGNMENT = 256  # bytes, of a tensor in a buffer
BUFFERS = 2
T = TypeVar("T")
#: A UNet's parts in the order of its forward pass; modules of other denoisers are in this order.
UNET = ("down_blocks", "mid_block", "up_blocks")


def transformer_blocks(network: Network) -> list[torch.nn.Module]:
    """The denoiser's blocks that may be streamed, in the order of the forward pass."""
    found = [
        (UNET.index(part) if (part := name.partition(".")[0]) in UNET else 0, module)
        for name, module in network.denoiser.named_modules()
        if type(module).__name__ in network.family.chained_blocks
    ]
    return [module for _, module in sorted(found, key=lambda pair: pair[0])]


def stream_blocks(network: Network, count: int, device: torch.device) -> BlockStream | None:
    """Stream `count` blocks of a network on the host, or all if it has fewer; None: 0.

    Errors: `BlockStream`.
    """
    chosen = _at_equal_distances(transformer_blocks(network), count)
    return BlockStream(chosen, device) if chosen else None


def streaming_bytes(network: Network, alignment: int) -> list[tuple[int, int]]:
    """Bytes that leave the device, less its buffers, and bytes pinned on the host, by `count`.

    Args:
        network: on any device.
        alignment: of the device's allocator, in bytes.
    """
    blocks = transformer_blocks(network)
    held = [sum(aligned(t.nbytes, alignment) for *_, t in _frozen_tensors(b)) for b in blocks]
    sizes = list(map(_host_bytes, blocks))
    moved = [(0, 0)]
    for count in range(1, len(blocks) + 1):
        chosen = _at_equal_distances(range(len(blocks)), count)
        pinned = [sizes[number] for number in chosen]
        buffers = BUFFERS * aligned(max(pinned), alignment)
        moved.append((sum(held[number] for number in chosen) - buffers, sum(pinned)))
    return moved


def _at_equal_distances(blocks: Sequence[T], count: int) -> list[T]:
    """`count` of the blocks, or all: those between them hide the copies."""
    count = min(count, len(blocks))
    return [blocks[number * len(blocks) // count] for number in range(count)]


class BlockStream:
    """Moves the frozen tensors of blocks on the host to pinned memory, and streams them.

    Args:
        blocks: on the host, in the order of the forward pass; changed in place.
        device: device of the buffers.

    Attributes:
        arena: the blocks' tensors, in pinned memory [bytes] uint8.
        copies: number of blocks copied so far.
        late: number of those that a block had to wait for, since none was copied ahead.

    Raises:
        Refused: the host's memory cannot be pinned.
    """

    @torch.no_grad()
    def __init__(self, blocks: Sequence[torch.nn.Module], device: torch.device) -> None:
        self._blocks = blocks
        sizes = list(map(_host_bytes, blocks))
        # Memory is touched when a block moves into it, and the block's own is freed then.
        self.arena = torch.empty(
            sum(sizes), dtype=torch.uint8, pin_memory=device.type not in ("cpu", "cuda")
        )
        self._on_host = self.arena.split(sizes)
        buffers = [
            torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in range(BUFFERS)
        ]
        self._on_device = [buffers[number % BUFFERS][:size] for number, size in enumerate(sizes)]
        for block, host, there in zip(blocks, self._on_host, self._on_device, strict=True):
            _move(block, host, there)
        if device.type == "cuda":
            _pin(self.arena, self)
        self._held = [-1] * BUFFERS  # number of the block in each buffer
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream: Any = self._module and self._module.Stream()
        self.copies = 0
        self.late = 0

    def start(self) -> None:
        """Copy each block before it runs, outside of its compiled program. After compilation."""
        for number, block in enumerate(self._blocks):
            run = block._compiled_call_impl or block._call_impl
            block._compiled_call_impl = partial(self._run, number, run)  # what a call runs

    def _run(self, number: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.late += self._held[number % BUFFERS] != number
        self._copy(number)
        if self._module is not None:
            self._module.current_stream().wait_stream(self._stream)
        is_backward = torch._C._current_graph_task_id() != -1
        ahead = number - 1 if is_backward else number + 1
        if 0 <= ahead < len(self._blocks):
            self._copy(ahead)
        return run(*args, **kwargs)

    def _copy(self, number: int) -> None:
        if self._held[number % BUFFERS] == number:
            return
        self._held[number % BUFFERS] = number
        self.copies += 1
        if self._module is None:
            self._on_device[number].copy_(self._on_host[number])
            return
        self._stream.wait_stream(self._module.current_stream())  # the buffer's last reader
        with self._module.stream(self._stream):
            self._on_device[number].copy_(self._on_host[number], non_blocking=True)


def _frozen_tensors(
    block: torch.nn.Module,
) -> Iterator[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]]:
    """Frozen parameters and buffers of a block, each with the mapping that has it by name."""
    for module in block.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and not tensor.requires_grad:
                    yield tensors, name, tensor


def _move(block: torch.nn.Module, host: torch.Tensor, device: torch.Tensor) -> None:
    """Move a block's frozen tensors to `host`; the block has views of `device` in their place."""
    offset = 0
    for tensors, name, tensor in list(_frozen_tensors(block)):
        part = slice(offset, offset + tensor.nbytes)
        host[part].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        view = device[part].view(tensor.dtype).view(tensor.shape)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        # Not `tensor.data = view`, which hides from autograd that a buffer was written to.
        tensors[name] = torch.nn.Parameter(view, requires_grad=False) if is_parameter else view
        offset += aligned(tensor.nbytes, ALIGNMENT)


def _host_bytes(block: torch.nn.Module) -> int:
    return sum(aligned(tensor.nbytes, ALIGNMENT) for *_, tensor in _frozen_tensors(block))


def _pin(memory: torch.Tensor, owner: object) -> None:
    """Pin memory in place, while `owner` lives; PyTorch's own is rounded up to a power of two."""
    cuda = torch.cuda.cudart()
    error = cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error):
        raise Refused(
            f"train.stream_blocks: CUDA cannot pin {memory.nbytes / 2**30:.1f} GiB of the host's "
            f"memory ({error}): set fewer blocks, or raise the limit of locked memory"
        )
    weakref.finalize(owner, lambda kept: cuda.cudaHostUnregister(kept.data_ptr()), memory)
