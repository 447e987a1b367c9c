"""What a device runs: the hooks of its kind, attention kernels and compiled denoisers.

The hooks are what a kind of device does differently in the shared training and sampling code.
`DeviceHooks` serves CPU, CUDA and Ascend. Another kind derives a class from it, which `open_device`
(device.py) constructs. torch_npu is imported only if device npu is selected.

Attention kernels of CUDA have their names in `train.attention`. torch.compile compiles a denoiser
whole, or its repeated blocks one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from configs.errors import Refused
from configs.secrets import one_line
from runtimes.detect_hardware import find_c_compiler, missing_for_npu
from runtimes.families import repeated_blocks
from runtimes.torch_models.activation_memory import without_recomputation


class DeviceHooks:
    """A device, and the hooks for its kind."""

    compile_backend = "inductor"  # of torch.compile
    prefetches_batches = True  # whether the loader's thread copies batches during a step
    pads_batches = False  # whether image batches are padded to one size, to reuse one program
    autocast_caches_casts = True  # `cache_enabled` of torch.autocast
    foreach: bool | None = True  # `foreach` of PyTorch's gradient clipping

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def prepare_training(self, denoiser: Any) -> None:
        """Prepare a denoiser on the device for training."""

    def prepare_sampling(self, denoiser: Any) -> None:
        """Prepare a denoiser on the device for sampling; its weights must not change afterwards."""

    def clip_grad_norm(self, masters: Sequence[torch.Tensor], most: float) -> torch.Tensor | None:
        """Clip gradients to a global L2 norm with a kernel of the device.

        Args:
            masters: with their gradients, which are scaled in place.
            most: largest allowed norm.

        Returns:
            The norm before clipping, a scalar on the device. None if the device has no such kernel;
            the caller then clips with PyTorch.
        """
        return None

    def scalar(self, value: float) -> float | torch.Tensor:
        """A number that changes with each step, as an operand that causes no recompilation."""
        return value

    def mark_step(self) -> None:
        """End the current graph on devices that execute lazily."""

    def save_compiled(self) -> None:
        """Save newly compiled programs to the cache. No step may be in progress."""

    def figures(self) -> dict[str, float]:
        """Metrics that only this kind of device reports."""
        return {}

    def compile_seconds(self) -> float:
        """Seconds of compilation so far; 0 where the device compiles nothing."""
        return 0.0


def load() -> None:
    """Register device npu with PyTorch. Raises Refused if torch_npu cannot be imported."""
    try:
        import torch_npu  # noqa: F401  # registers the device
    except (ImportError, RuntimeError, OSError) as error:
        raise not_loaded("device npu: torch_npu", error, missing_for_npu()) from None


def not_loaded(package: str, error: Exception, missing: Sequence[str]) -> Refused:
    """The error where a device's package does not load, with what the machine lacks."""
    words = f" ({'; '.join(missing)})" if missing else ""
    return Refused(f"{package} does not load: {one_line(error, 200)}{words}")


def enable_npu_attention(denoiser: Any, device: torch.device) -> None:
    """Enable the NPU's fused attention in a UNet.

    The fused operator supports half precision only; diffusers' processor falls back to unfused
    attention in float32. SD3 keeps its processors: they compute joint attention over image and
    text tokens, which the NPU processor does not.
    """
    from diffusers.models.attention_processor import AttnProcessor2_0

    processors = getattr(denoiser, "attn_processors", {}).values()
    if device.type == "npu" and {type(each) for each in processors} == {AttnProcessor2_0}:
        denoiser.enable_npu_flash_attention()


KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "flash_3": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
#: PyTorch's errors without a kernel, on CUDA and on a CPU, and cuDNN's own.
NO_KERNEL = ("No available kernel", "No viable backend", "No execution plans support the graph")
#: The module of FlashAttention 3, which no package of PyTorch contains.
FLASH_3 = "flash_attn_interface"
HOPPER = (9, 0)  # compute capability


@contextmanager
def attention_kernel(name: str) -> Iterator[None]:
    """Context in which scaled_dot_product_attention uses the kernel that `train.attention` names.

    Raises:
        Refused: the kernel does not support the shapes, or a mask: flash attention takes none.
    """
    if name == "auto":
        yield
        return
    # PyTorch's cache of compiled programs does not tell the kernels in them apart.
    programs = torch.compiler.config.patch(cache_key_tag=name)
    try:
        with sdpa_kernel(KERNELS[name]), programs:
            yield
    except RuntimeError as error:
        if not any(words in str(error) for words in NO_KERNEL):
            raise
        raise Refused(
            f"train.attention: {name} does not compute this model's attention: set auto"
        ) from None


def check_attention(name: str, device: torch.device) -> None:
    """Raise Refused if a device or this environment lacks the kernel."""
    if name != "flash_3":
        return
    if not hasattr(attention, "activate_flash_attention_impl"):
        raise Refused("train.attention: flash_3 needs PyTorch 2.11 or later: set flash")
    if find_spec(FLASH_3) is None:
        raise Refused(
            f"train.attention: flash_3 needs FlashAttention 3, whose module {FLASH_3} is not "
            "installed: install it, or set flash"
        )
    if torch.cuda.get_device_capability(device) != HOPPER:
        raise Refused("train.attention: flash_3 needs a Hopper GPU, such as H100: set flash")


def load_attention(name: str) -> None:
    """Let PyTorch's flash attention of this process call FlashAttention 3, if it is named."""
    if name == "flash_3":
        attention.activate_flash_attention_impl("FA3")


#: Programs per function. ResnetBlock2D alone has a program for each number of channels and size.
PROGRAMS = 256
NO_COMPILER = "no C compiler is on PATH, which torch.compile calls: install g++"
#: Methods of Transformer2DModel that call its layers outside of the blocks.
AROUND_BLOCKS = ("_operate_on_continuous_inputs", "_get_output_for_continuous_inputs")
log = logging.getLogger("kiln")


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
