"""Compile a denoiser by torch.compile: its repeated blocks one by one, or the whole module."""

from __future__ import annotations

import logging
from typing import Any

import torch

from configs.errors import Refused
from runtimes.families import repeated_blocks
from runtimes.hosts.host import find_c_compiler
from runtimes.torch.device_hooks import DeviceHooks
from runtimes.torch_models.gradient_checkpointing import without_recomputation

#: Programs per function. ResnetBlock2D alone has a program for each number of channels and size.
PROGRAMS = 256
NO_COMPILER = "no C compiler is on PATH, which torch.compile calls: install g++"
#: Methods of Transformer2DModel that call its layers outside of the blocks.
AROUND_BLOCKS = ("_operate_on_continuous_inputs", "_get_output_for_continuous_inputs")
log = logging.getLogger("kiln")


def check_compiler(what: str) -> None:
    """Raise Refused if `train.compile` demands programs and there is no C compiler."""
    if find_c_compiler() is None:
        raise Refused(f"train.compile: {what}: {NO_COMPILER}, or set train.compile=none")


def compile_denoiser(
    denoiser: Any, what: str, device_hooks: DeviceHooks, recomputed: str = "none"
) -> None:
    """Compile in place; names of modules and parameters do not change.

    Blocks of equal structure share a program, and gradient checkpointing stays outside of it.
    Selective recomputation is left to PyTorch's partitioner, which computes cheap operations of a
    program again: a checkpoint outside would see a single operation.

    Args:
        denoiser: a diffusers denoiser on its device.
        what: `train.compile`.
        device_hooks: gives the backend, and the choice of `auto`.
        recomputed: `train.gradient_checkpointing`.
    """
    if what == "auto":
        what = "blocks" if device_hooks.device.type == "cuda" else "none"
        if what == "blocks" and find_c_compiler() is None:
            log.warning("training is not compiled, and slower: %s", NO_COMPILER)
            what = "none"
    if what == "none":
        return
    # At the default of 8, PyTorch silently runs further blocks and shapes uncompiled.
    torch._dynamo.config.recompile_limit = PROGRAMS
    torch._dynamo.config.accumulated_recompile_limit = PROGRAMS
    blocks = repeated_blocks()
    for module in denoiser.modules():
        if module is denoiser if what == "denoiser" else type(module).__name__ in blocks:
            module.compile(backend=device_hooks.compile_backend, dynamic=False)
    if what == "blocks":
        _compile_around_blocks(denoiser, device_hooks.compile_backend)
    if recomputed == "selective":
        without_recomputation(denoiser)


def _compile_around_blocks(denoiser: Any, backend: str) -> None:
    """Compile the layers of a UNet's attention before and after their transformer blocks.

    Uncompiled on CUDA, group norm copies its input to float32 and to NCHW, and the next layer
    copies it back. Copies between layouts took 7% of the device's time in SD2's step on an H100.
    """
    for module in denoiser.modules():
        if type(module).__name__ == "Transformer2DModel":
            for name in AROUND_BLOCKS:
                compiled = torch.compile(getattr(module, name), backend=backend, dynamic=False)
                setattr(module, name, compiled)
