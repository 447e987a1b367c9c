"""Frozen models whose weights stay in the host's memory; a layer is on the device while it runs."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from runtimes.detect_hardware import PINNED, host_memory

log = logging.getLogger("kiln")
#: Kinds of devices that diffusers copies single layers to; on the CPU nothing moves.
OFFLOADING = ("cuda", "cpu")
#: PyTorch rounds an allocation of pinned memory up to a power of two, so weights share blocks.
BLOCK = 2**30  # bytes
ALIGNMENT = 64  # bytes


def offload_layers(model: torch.nn.Module, device: torch.device) -> None:
    """Copy each layer of a model on the host to a device before it runs, and drop it afterwards.

    On CUDA, the next layer is copied from pinned memory on a separate stream while the kernels of
    the current layer run. The first pass records the order of layers. What the host cannot pin of
    weights that are mapped from a file is read from the file in each pass.
    """
    from diffusers.hooks import apply_group_offloading

    streams = device.type == "cuda"
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    most = int(PINNED * host_memory())
    if streams:
        move_to_blocks(model, partial(torch.empty, dtype=torch.uint8, pin_memory=True), most)
    if streams and size > most:
        log.warning(
            "offload: this host can pin %.1f of %.1f GiB of weights; each pass reads the rest from "
            "the files, which is slower",
            most / 2**30,
            size / 2**30,
        )
    apply_group_offloading(
        model,
        onload_device=device,
        offload_type="leaf_level",
        use_stream=streams,
        low_cpu_mem_usage=True,  # a layer that is not pinned is, when it is copied
    )


@torch.no_grad()
def move_to_blocks(
    model: torch.nn.Module, allocate: Callable[[int], torch.Tensor], most: int
) -> None:
    """Move a model's tensors into shared blocks of memory, and free their own one by one.

    Args:
        model: on the host.
        allocate: returns that many bytes, a tensor of dtype uint8.
        most: bytes of all blocks; the tensors that exceed them stay.
    """
    tensors = [*model.parameters(), *model.buffers()]
    sizes = [aligned(tensor.nbytes, ALIGNMENT) for tensor in tensors]
    sizes = sizes[: bisect_right(list(accumulate(sizes)), most)]
    left = sum(sizes)
    used = 0
    block = torch.empty(0, dtype=torch.uint8)
    for tensor, size in zip(tensors, sizes, strict=False):
        if used + size > block.nbytes:
            used = 0
            block = allocate(max(size, min(BLOCK, left)))
        moved = block[used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensor.data = moved.copy_(tensor)
        used = used + size
        left = left - size


def aligned(size: Any, alignment: int) -> Any:
    """Bytes, or an array of them, rounded up to a multiple of `alignment`."""
    return -(-size // alignment) * alignment
