"""Run a model whose weights stay in the host's memory; a layer is on the device while it runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

#: Kinds of devices that diffusers copies single layers to; on the CPU nothing moves.
OFFLOADING = ("cuda", "cpu")
#: PyTorch rounds an allocation of pinned memory up to a power of two, so weights share blocks.
BLOCK = 2**30  # bytes
ALIGNMENT = 64  # bytes


def offload_layers(model: torch.nn.Module, device: torch.device) -> None:
    """Copy each layer of a model on the host to a device before it runs, and drop it afterwards.

    On CUDA, the next layer is copied from pinned memory on a stream of its own during the current
    one's kernels. The first pass records the order of layers.
    """
    from diffusers.hooks import apply_group_offloading

    if device.type == "cuda":
        move_to_blocks(model, partial(torch.empty, dtype=torch.uint8, pin_memory=True))
    apply_group_offloading(  # memory that is pinned already is not copied
        model,
        onload_device=device,
        offload_type="leaf_level",
        use_stream=device.type == "cuda",
    )


@torch.no_grad()
def move_to_blocks(model: torch.nn.Module, allocate: Callable[[int], torch.Tensor]) -> None:
    """Move all tensors of a model into shared blocks of memory, and free their own one by one.

    Args:
        model: on the host.
        allocate: returns that many bytes, a tensor of dtype uint8.
    """
    tensors = [*model.parameters(), *model.buffers()]
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    left, used, block = sum(sizes), 0, torch.empty(0, dtype=torch.uint8)
    for tensor, size in zip(tensors, sizes, strict=True):
        if used + size > block.nbytes:
            used, block = 0, allocate(max(size, min(BLOCK, left)))
        moved = block[used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensor.data = moved.copy_(tensor)
        used, left = used + size, left - size
