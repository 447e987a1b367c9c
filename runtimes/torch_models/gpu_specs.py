"""Memory, peak FLOP/s and PCIe bandwidth of GPUs from their data sheets."""

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
    A laptop's rates depend on its power limit, and are not listed.
    """

    name: str  # for messages and `--gpu`
    pattern: str  # of the device name in PyTorch
    memory_gib: float  # GiB; data sheets call them GB
    bfloat16: float | None  # TFLOP/s; None without bfloat16 tensor cores
    float32: float | None  # TFLOP/s
    pcie: float = 31.5  # GB/s from the host, in theory; 31.5 is 16 lanes of PCIe 4
    tested: bool = True  # whether runtime torch has been run on GPUs of its kind

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


def _suffixed(name: str, suffix: str = "") -> str:
    """A pattern of a device name that ends there: 4060 is neither 4060 Ti nor 4060 Laptop."""
    return rf"\b{name}{suffix}\b(?! ?(?:Ti|SUPER|D|Laptop|XT|XTX|GRE)\b)"


def _stem(name: str) -> str:
    """A name without the memory in it, which PyTorch's device name lacks."""
    return re.sub(r" ?\d+ ?GB$", "", name, flags=re.I)


def _geforce(model: str, memory: float, float32: float, pcie: float) -> GpuSpec:
    """Tensor cores of GeForce cards have twice the float32 rate, in all three generations."""
    name = f"RTX {model}"
    return GpuSpec(name, _suffixed(_stem(name)), memory, 2 * float32, float32, pcie)


def _laptop(model: str, memory: float) -> GpuSpec:
    pattern = _suffixed(f"RTX {_stem(model)}", " Laptop")
    size = model.removeprefix(_stem(model))
    return GpuSpec(f"RTX {_stem(model)} Laptop{size}", pattern, memory, None, None)


def _untested(model: str, memory: float) -> GpuSpec:
    pattern = _suffixed(_stem(model))
    return GpuSpec(model, pattern, memory, None, None, tested=False)


#: The first match of a device name applies. Sources: NVIDIA's data sheets, with sparse figures
#: halved; for GeForce cards the white papers "Ada GPU architecture" (table 4), "GA102" (table 3)
#: and "RTX Blackwell" (appendix A), whose tensor cores have twice the float32 rate; for A10G the
#: page of AWS's G5 instances. Smaller GeForce cards have the published float32 rate, which nobody
#: compared with a data sheet here. The driver reports 1% to 8% less memory.
GPU_SPECS = (
    GpuSpec("GB200", r"GB200", 186, 2500.0, 80.0, 63.0),
    GpuSpec("B200", r"B200", 180, 2250.0, 75.0, 63.0),
    GpuSpec("H200 NVL", r"H200 NVL", 141, 835.5, 60.0, 63.0),
    GpuSpec("H200", r"H200|GH200", 141, 989.5, 67.0, 63.0),
    GpuSpec("H100 NVL", r"H100 NVL", 94, 835.5, 60.0, 63.0),
    GpuSpec("H100 PCIe", r"H100 PCIe", 80, 756.5, 51.0, 63.0),
    GpuSpec("H100", r"H100", 80, 989.5, 67.0, 63.0),
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
    _geforce("5090", 32, 104.8, 63.0),
    _geforce("5080", 16, 56.3, 63.0),
    _geforce("5070 Ti", 16, 43.9, 63.0),
    _geforce("5070", 12, 30.9, 63.0),
    _geforce("5060 Ti 8GB", 8, 23.7, 31.5),
    _geforce("5060 Ti 16GB", 16, 23.7, 31.5),
    _geforce("5060", 8, 19.2, 31.5),
    _geforce("5050", 8, 13.2, 31.5),
    _geforce("4090", 24, 82.6, 31.5),
    _geforce("4090 D", 24, 73.5, 31.5),
    _geforce("4080 SUPER", 16, 52.2, 31.5),
    _geforce("4080", 16, 48.7, 31.5),
    _geforce("4070 Ti SUPER", 16, 44.1, 31.5),
    _geforce("4070 Ti", 12, 40.1, 31.5),
    _geforce("4070 SUPER", 12, 35.5, 31.5),
    _geforce("4070", 12, 29.1, 31.5),
    _geforce("4060 Ti 8GB", 8, 22.1, 15.8),
    _geforce("4060 Ti 16GB", 16, 22.1, 15.8),
    _geforce("4060", 8, 15.1, 15.8),
    _geforce("3090 Ti", 24, 40.0, 31.5),
    _geforce("3090", 24, 35.6, 31.5),
    _geforce("3080 Ti", 12, 34.1, 31.5),
    _geforce("3080 10GB", 10, 29.8, 31.5),
    _geforce("3080 12GB", 12, 30.6, 31.5),
    _geforce("3070 Ti", 8, 21.7, 31.5),
    _geforce("3070", 8, 20.3, 31.5),
    _geforce("3060 Ti", 8, 16.2, 31.5),
    _geforce("3060", 12, 12.7, 31.5),  # the usual one, so that 3060 alone is enough
    _geforce("3060 8GB", 8, 12.7, 31.5),
    _geforce("3050 6GB", 6, 6.8, 15.8),
    _geforce("3050 8GB", 8, 9.1, 15.8),
    _laptop("5090", 24),
    _laptop("5080", 16),
    _laptop("5070 Ti", 12),
    _laptop("5070", 8),
    _laptop("5060", 8),
    _laptop("5050", 8),
    _laptop("4090", 16),
    _laptop("4080", 12),
    _laptop("4070", 8),
    _laptop("4060", 8),
    _laptop("4050", 6),
    _laptop("3080 Ti", 16),
    _laptop("3080 8GB", 8),
    _laptop("3080 16GB", 16),
    _laptop("3070 Ti", 8),
    _laptop("3070", 8),
    _laptop("3060", 6),
    _laptop("3050 Ti", 4),
    _laptop("3050 4GB", 4),
    _laptop("3050 6GB", 6),
    GpuSpec("V100 32", r"V100\D.*32", 32, None, 15.7, 15.8),
    GpuSpec("V100", r"V100", 16, None, 15.7, 15.8),
    GpuSpec("T4", r"T4\b", 16, None, 8.1, 15.8),
    GpuSpec("MI325X", r"MI325X", 256, 1307.4, 163.4, 63.0, tested=False),
    GpuSpec("MI300X", r"MI300X", 192, 1307.4, 163.4, 63.0, tested=False),
    GpuSpec("MI250X", r"MI250X", 64, 191.5, 23.9, tested=False),  # one of its two dies, as PyTorch
    GpuSpec("MI210", r"MI210", 64, 181.0, 22.6, tested=False),
    _untested("W7900", 48),
    _untested("RX 9070 XT", 16),
    _untested("RX 9070 GRE", 12),
    _untested("RX 9070", 16),
    _untested("RX 9060 XT 8GB", 8),
    _untested("RX 9060 XT 16GB", 16),
    _untested("RX 7900 XTX", 24),
    _untested("RX 7900 XT", 20),
    _untested("RX 7900 GRE", 16),
    _untested("RX 7800 XT", 16),
    _untested("RX 7700 XT", 12),
    _untested("RX 7600 XT", 16),
    _untested("RX 7600", 8),
    _untested("RX 6950 XT", 16),
    _untested("RX 6900 XT", 16),
    _untested("RX 6800 XT", 16),
    _untested("RX 6800", 16),
    _untested("RX 6750 XT", 12),
    _untested("RX 6700 XT", 12),
    _untested("RX 6600 XT", 8),
    _untested("RX 6600", 8),
)
_CARD = re.compile(r"RTX \d|RX \d")
CARDS = "a GeForce RTX 3050 to 5090, a Radeon RX 6600 to 9070 XT, or a Mac's chip (M4 Max 64GB)"
#: A Mac's chip, whose GPU has at most this share of the machine's memory by default.
_APPLE = re.compile(r"(?:Apple )?(M[1-5](?: (?:Pro|Max|Ultra))?)(?: (\d+) ?GB)?", re.I)
APPLE_SHARE = 0.75


def known_gpu(device_name: str) -> GpuSpec | None:
    """The model of GPU that a device name of PyTorch contains; None if it is unknown."""
    return next((gpu for gpu in GPU_SPECS if re.search(gpu.pattern, device_name, re.I)), None)


def known_peak(device_name: str, dtype: str) -> float | None:
    """Peak FLOP/s of the GPU with a device name (see GpuSpec.peak); None if it is unknown."""
    gpu = known_gpu(device_name)
    return None if gpu is None else gpu.peak(dtype)


#: What a name may have beside the model. Other words make another model, or several GPUs.
_BESIDE = r"(NVIDIA|Tesla|GeForce|AMD|Radeon|PRO|Instinct|GPU|SXM\d?|PCIe|HBM\d\w?|\d* ?GB|[\s-])*"


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

    As on data sheets, a GB of GPU memory has 2**30 bytes. A Mac's chip has the machine's memory
    beside it: `M4 Max 64GB`.

    Raises:
        Refused: the name is unknown, ambiguous or contradicts the memory beside it, or the memory
            is 0.
    """
    size = re.fullmatch(r"(\d+(?:\.\d+)?) ?Gi?B?", text, re.I)
    if size and float(size[1]):
        return Gpu(f"{size[1]} GB", int(float(size[1]) * GIB))
    if chip := _APPLE.fullmatch(text):
        return _apple(*chip.groups())
    named = _named(text)
    if not named:
        names = ", ".join(gpu.name for gpu in GPU_SPECS if not _CARD.match(gpu.name))
        # Four digits, such as 2080, are a model.
        example = f"{text}GB" if re.fullmatch(r"[1-9]\d{0,2}", text) else "24GB"
        raise Refused(f"gpu {text}: set its memory, such as {example}, or one of {names}, {CARDS}")
    stated = re.search(r"(\d+) ?GB", text, re.I)
    alike = [gpu for gpu in named if not stated or _has(gpu, int(stated[1]))]
    if not alike:
        sizes = " or ".join(f"{gpu.memory_gib:g}" for gpu in named)
        raise Refused(
            f"gpu {text}: {_stem(named[0].name)} has {sizes} GB: give the name alone, or the "
            "GPU's memory alone"
        )
    if len(alike) > 1:
        raise Refused(f"gpu {text}: write {' or '.join(gpu.name for gpu in alike)}")
    return Gpu(alike[0].name, alike[0].memory, alike[0])


def _apple(chip: str, memory: str | None) -> Gpu:
    if memory is None:
        raise Refused(f"gpu {chip}: add the machine's memory, such as {chip} 32GB")
    spec = GpuSpec(f"Apple {chip}", "", APPLE_SHARE * int(memory), None, None, tested=False)
    return Gpu(spec.name, spec.memory, spec)


def _named(text: str) -> list[GpuSpec]:
    """The GPUs that a name may mean; several differ in memory alone."""
    exact = [gpu for gpu in GPU_SPECS if _plain(text) in _short_names(gpu.name)]
    if exact:
        return exact
    known = known_gpu(text)
    if known and re.fullmatch(f"{_BESIDE}(?:{known.pattern}){_BESIDE}", text, re.I):
        return [gpu for gpu in GPU_SPECS if gpu.pattern == known.pattern]
    return [gpu for gpu in GPU_SPECS if _plain(_stem(text)) in _short_names(_stem(gpu.name))]


def _has(gpu: GpuSpec, stated: int) -> bool:
    return abs(gpu.memory_gib - stated) <= 0.1 * gpu.memory_gib


def _short_names(name: str) -> tuple[str, ...]:
    plain = _plain(name)
    return plain, plain.removeprefix("rtx"), plain.removeprefix("rx")


def _plain(name: str) -> str:
    return re.sub(r"[\s-]|GeForce|NVIDIA", "", name, flags=re.I).lower()
