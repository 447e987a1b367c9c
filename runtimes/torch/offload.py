"""Run a model whose weights stay in the host's memory; a layer is on the device while it runs."""

from __future__ import annotations

import torch

#: Kinds of devices that diffusers copies single layers to; on the CPU nothing moves.
OFFLOADING = ("cuda", "cpu")


def offload_layers(model: torch.nn.Module, device: torch.device) -> None:
    """Copy each layer of a model on the host to a device before it runs, and drop it afterwards.

    On CUDA, the next layer is copied from pinned memory on a stream of its own during the current
    one's kernels. The first pass records the order of layers.
    """
    from diffusers.hooks import apply_group_offloading

    apply_group_offloading(
        model,
        onload_device=device,
        offload_type="leaf_level",
        use_stream=device.type == "cuda",
    )
