"""Memory and peak FLOP/s of GPUs from their data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

from configs.errors import Refused

GIB = 2**30
#: Share of a GPU's memory for tensors. The rest is the CUDA context, workspaces of kernels and
#: fragmentation of the allocator; drivers also report up to 8% less than data sheets.
USABLE = 0.92


@dataclass(frozen=True)
class GpuSpec:
    """One model of GPU.

    bfloat16 is dense, on tensor cores with float32 accumulation; float32 is without tensor cores.
    """

    name: str  # for messages and `--gpu`
    pattern: str  # of the device name in PyTorch
    memory_gib: float  # GiB; data sheets call them GB
    bfloat16: float | None  # TFLOP/s; None without bfloat16 tensor cores
    float32: float  # TFLOP/s

    @property
    def memory(self) -> int:
        """Memory in bytes."""
        return int(self.memory_gib * GIB)

    def peak(self, dtype: str) -> float | None:
        """Peak FLOP/s of products; None if unknown.

        Args:
            dtype: as Train.product_dtype. TF32 has half of bfloat16's rate on all data sheets; GPUs
                without it compute in float32.
        """
        if dtype == "tf32" and self.bfloat16 is not None:
            return self.bfloat16 * 1e12 / 2
        tera = self.bfloat16 if dtype == "bfloat16" else self.float32
        return None if tera is None else tera * 1e12


#: The first match of a device name applies. Sources: NVIDIA's data sheets, with sparse figures
#: halved; for GeForce cards the white papers "Ada GPU architecture" (table 4), "GA102" (table 3)
#: and "RTX Blackwell" (appendix A); for A10G the page of AWS's G5 instances; for MI300X AMD's data
#: sheet. The driver reports 1% to 8% less memory.
GPU_SPECS = (
    GpuSpec("GB200", r"GB200", 186, 2500.0, 80.0),
    GpuSpec("B200", r"B200", 180, 2250.0, 75.0),
    GpuSpec("H200 NVL", r"H200 NVL", 141, 835.5, 60.0),
    GpuSpec("H200", r"H200|GH200", 141, 989.5, 67.0),
    GpuSpec("H100 NVL", r"H100 NVL", 94, 835.5, 60.0),
    GpuSpec("H100 PCIe", r"H100 PCIe", 80, 756.5, 51.0),
    GpuSpec("H100", r"H100", 80, 989.5, 67.0),
    GpuSpec("A100 80", r"A[18]00\D.*80", 80, 312.0, 19.5),
    GpuSpec("A100 40", r"A100|A800", 40, 312.0, 19.5),
    GpuSpec("A40", r"A40\b", 48, 149.7, 37.4),
    GpuSpec("A30", r"A30\b", 24, 165.0, 10.3),
    GpuSpec("A10G", r"A10G", 24, 70.0, 31.5),
    GpuSpec("A10", r"A10\b", 24, 125.0, 31.2),
    GpuSpec("L40S", r"L40S", 48, 362.0, 91.6),
    GpuSpec("L40", r"L40\b", 48, 181.0, 90.5),
    GpuSpec("L4", r"L4\b", 24, 121.0, 30.3),
    GpuSpec("RTX 6000 Ada", r"RTX 6000 Ada", 48, 364.2, 91.1),
    GpuSpec("RTX A6000", r"RTX A6000", 48, 154.8, 38.7),
    GpuSpec("RTX 5090", r"RTX 5090", 32, 209.5, 104.8),
    GpuSpec("RTX 4090", r"RTX 4090(?! Laptop)", 24, 165.2, 82.6),
    GpuSpec("RTX 3090", r"RTX 3090", 24, 71.0, 35.6),
    GpuSpec("V100 32", r"V100\D.*32", 32, None, 15.7),
    GpuSpec("V100", r"V100", 16, None, 15.7),
    GpuSpec("T4", r"T4\b", 16, None, 8.1),
    GpuSpec("MI300X", r"MI300X", 192, 1307.4, 163.4),
)


def known_gpu(device_name: str) -> GpuSpec | None:
    """The model of GPU that a device name of PyTorch contains; None if it is unknown."""
    return next((gpu for gpu in GPU_SPECS if re.search(gpu.pattern, device_name, re.I)), None)


def known_peak(device_name: str, dtype: str) -> float | None:
    """Peak FLOP/s of the GPU with a device name (see GpuSpec.peak); None if it is unknown."""
    gpu = known_gpu(device_name)
    return None if gpu is None else gpu.peak(dtype)


#: What a name may have beside the model. Other words make another model, or several GPUs.
_BESIDE = r"(NVIDIA|Tesla|GeForce|AMD|Instinct|GPU|SXM\d?|PCIe|HBM\d\w?|\d* ?GB|[\s-])*"


@dataclass(frozen=True)
class Gpu:
    """The GPU of a plan."""

    name: str
    memory: int  # bytes
    spec: GpuSpec | None = None  # None: only the memory is known

    @property
    def usable(self) -> int:
        """Bytes for tensors."""
        return int(USABLE * self.memory)


def parse_gpu(text: str) -> Gpu:
    """Parse a GPU's memory, such as `24GB`, or its name: `RTX 4090`, `4090` or `A100 80GB`.

    As on data sheets, a GB of GPU memory has 2**30 bytes.

    Raises:
        Refused: the name is unknown or contradicts the memory beside it, or the memory is 0.
    """
    size = re.fullmatch(r"(\d+(?:\.\d+)?) ?Gi?B?", text, re.I)
    if size and float(size[1]):
        return Gpu(f"{size[1]} GB", int(float(size[1]) * GIB))
    spec = next((gpu for gpu in GPU_SPECS if _plain(text) in _short_names(gpu)), None)
    if spec is None and (named := known_gpu(text)) is not None:
        spec = named if re.fullmatch(f"{_BESIDE}(?:{named.pattern}){_BESIDE}", text, re.I) else None
    if spec is None:
        names = ", ".join(gpu.name for gpu in GPU_SPECS)
        # Four digits, such as 5080, are a model.
        example = f"{text}GB" if re.fullmatch(r"[1-9]\d{0,2}", text) else "24GB"
        raise Refused(f"gpu {text}: set its memory, such as {example}, or one of {names}")
    stated = re.search(r"(\d+) ?GB", text, re.I)
    if stated and abs(spec.memory_gib - int(stated[1])) > 0.1 * spec.memory_gib:
        raise Refused(
            f"gpu {text}: {spec.name} has {spec.memory_gib:g} GB: give the name alone, or the "
            "GPU's memory alone"
        )
    return Gpu(spec.name, spec.memory, spec)


def _short_names(gpu: GpuSpec) -> tuple[str, str]:
    name = _plain(gpu.name)
    return name, name.removeprefix("rtx")


def _plain(name: str) -> str:
    return re.sub(r"[\s-]", "", name).lower()
