"""Time of a training step on a GPU, from its data sheet and stated factors.

The factors order the settings of a plan; none was measured by this project on a consumer card.
"""

from __future__ import annotations

from configs.settings.train import Train
from runtimes.process.questions import StepMemory
from runtimes.torch_models.gpu_specs import GpuSpec

#: Assumed share of a GPU's peak FLOP/s, about that of SD2 without torch.compile on an H100.
TYPICAL_MFU = 0.2
#: Time of a step by the precision of the frozen base. OneTrainer reports 5% to 7% for packed 8-bit
#: weights; Unsloth 1.81 steps/s of FLUX.1 in nf4 for 4.12 compiled in bfloat16 (B200).
PRECISION = {None: 1.0, "int8": 1.05, "nf4": 2.0}
#: Additional time if all blocks are streamed, in proportion if some are: 6.7 s became 9 s per step
#: of Z-Image in ai-toolkit (RTX 5090), although the copies are shorter than the computation.
STREAMED = 0.34
#: Share of PCIe's theoretical bandwidth that a copy from pinned memory reaches.
COPIED = 0.8


def executed_flops(step: StepMemory) -> float:
    """FLOPs per image, with recomputation."""
    return step.flops_per_image + step.recomputed_flops_per_image


def slowdown(train: Train, step: StepMemory) -> float:
    """Duration of a step relative to one with resident weights in the compute dtype."""
    precision = train.lora.base_precision if train.method == "lora" else None
    streamed = step.streamed / (step.streamed + step.weights)
    return PRECISION[precision] * (1 + STREAMED * streamed)


def copied_per_image(train: Train, step: StepMemory) -> float:
    """Bytes of streamed blocks, which are copied in the forward and in the backward pass."""
    return 2 * step.streamed / train.micro_batch(train.world_size)


def seconds_per_image(
    gpu: GpuSpec, dtype: str, flops: float, slowdown: float = 1.0, copied: float = 0.0
) -> float | None:
    """Seconds of training per image; None if the GPU's peak is unknown.

    Copies cost more than `STREAMED` only if they take longer than the computation.

    Args:
        dtype: as of `GpuSpec.peak`.
        flops: per image, with recomputation.
        copied: bytes per image, as of `copied_per_image`.
    """
    peak = gpu.peak(dtype)
    if peak is None:
        return None
    computing = flops / (peak * TYPICAL_MFU) * slowdown
    return max(computing, copied / (gpu.pcie * 1e9 * COPIED))


def step_seconds(train: Train, step: StepMemory, gpu: GpuSpec) -> float | None:
    """Seconds per optimizer step; None if the GPU's peak is unknown."""
    about = (executed_flops(step), slowdown(train, step), copied_per_image(train, step))
    seconds = seconds_per_image(gpu, train.product_dtype, *about)
    return seconds and seconds * train.global_batch_size / train.world_size
