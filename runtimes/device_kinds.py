"""What a kind of device rules out, known on machines that have none."""

from __future__ import annotations

from configs.errors import Refused
from configs.settings.train import Train

#: Runtime -> the kinds of devices that it knows.
KINDS: dict[str, tuple[str, ...]] = {
    "torch": ("auto", "cpu", "mps", "cuda", "npu", "hpu"),
    "jax": ("auto", "cpu", "tpu", "cuda"),
    "xla": ("auto", "cpu", "tpu"),
    "mindspore": ("auto", "cpu", "ascend"),
}
#: PyTorch's kinds on which `train.stream_blocks` was shown; on the CPU it saves nothing.
STREAMING = ("cuda", "npu", "cpu")


def check_name(runtime: str, settings: Train) -> None:
    """Raise Refused for a device that the runtime cannot have, or one for several processes."""
    kind, _, number = settings.device.partition(":")
    if kind not in KINDS[runtime]:
        words = f"{settings.device} is not for runtime {runtime}: set {', '.join(KINDS[runtime])}"
        raise Refused(words, setting="train.device")
    if settings.world_size > 1 and (number or kind == "mps"):
        words = f"{settings.device} is one device for {settings.world_size} processes"
        raise Refused(words, setting="train.device", remedy="leave the number out, or set auto")


def check_kind(settings: Train, kind: str) -> None:
    """Raise Refused for train settings that a kind of PyTorch's devices rules out."""
    if settings.optimizer.endswith("_8bit") and kind not in ("cpu", "cuda"):
        words = f"{settings.optimizer} is not for device {kind}; set adamw or adafactor"
        raise Refused(words, setting="train.optimizer")
    for name in ("cuda_graphs", "allow_tf32"):
        if getattr(settings, name) and kind != "cuda":
            raise Refused(f"train.{name} needs a CUDA device, not {kind}: set false")
    if settings.stream_blocks and kind not in STREAMING:
        raise Refused(f"train.stream_blocks needs CUDA or an NPU, not {kind}: set 0")
    if settings.attention != "auto" and kind != "cuda":
        raise Refused(f"train.attention needs a CUDA device, not {kind}: set auto")
    if kind == "hpu" and settings.optimizer != "adamw":
        raise Refused(
            f"train.optimizer: {settings.optimizer} is not for device hpu: its scalars would "
            "recompile every step; set adamw"
        )
    if kind == "hpu" and settings.fused_backward:
        raise Refused("train.fused_backward is not for device hpu: set false")
