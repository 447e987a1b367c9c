"""The machine that a new recipe is for: found on this host, or named."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal

from configs.errors import Refused
from runtimes.detect_hardware import count_hpus, count_npus, host_memory, usable_gpus
from runtimes.spmd.tpu_sharding import TPU_SPECS, parse_slice
from runtimes.torch_models.gpu_specs import GIB, Gpu, known_gpu, parse_gpu
from tasks.progress import gib

#: Kind -> the name in messages, and the least memory of such a chip: an Ascend 910B, a Gaudi 2.
CHIPS = {"npu": ("Ascend NPU", 32), "hpu": ("Gaudi", 96)}
#: Variable of Cloud TPU's images and of GKE with the type of the slice.
TPU_VARIABLE = "TPU_ACCELERATOR_TYPE"
EXAMPLES = "RTX 4090, 24GB, 4 x H100, v5p-8, npu 64GB, hpu or cpu"


@dataclass(frozen=True)
class Machine:
    """An accelerator, and how many of it train together."""

    kind: Literal["gpu", "npu", "hpu", "tpu", "cpu"]
    gpu: Gpu | None  # what a plan reads; None: a TPU slice
    count: int = 1
    topology: str | None = None  # of a TPU slice

    @property
    def name(self) -> str:
        """As a person would name it, and as `parse_machine` reads it."""
        if self.gpu is None:
            return str(self.topology)
        if self.kind == "cpu":
            return "cpu"
        if self.kind != "gpu":
            return f"{self.kind} {self.gpu.memory / GIB:g}GB"
        return self.gpu.name if self.count == 1 else f"{self.count} x {self.gpu.name}"

    @property
    def words(self) -> str:
        """The machine in a line, with its memory."""
        if self.gpu is None:
            return f"TPU slice {self.topology}"
        if self.kind == "cpu":
            return f"the CPU, with {gib(self.gpu.memory, 1)} of memory"
        name = self.name if self.kind == "gpu" else CHIPS[self.kind][0]
        return f"{name}, {gib(self.gpu.memory, 1)}"


def find_machine() -> Machine | None:
    """The accelerators of this host; None without any."""
    if gpus := usable_gpus():
        largest = max(gpus, key=lambda gpu: gpu.memory)
        alike = sum(gpu == largest for gpu in gpus)
        return Machine("gpu", Gpu(largest.name, largest.memory, known_gpu(largest.name)), alike)
    if count := count_npus():
        return _chip("npu", None, count)
    if count := count_hpus():
        return _chip("hpu", None, count)
    if slice_type := os.environ.get(TPU_VARIABLE):
        return Machine("tpu", None, topology=parse_slice(slice_type).name)
    return None


def _chip(kind: Literal["npu", "hpu"], memory: str | None, count: int = 1) -> Machine:
    name, least = CHIPS[kind]
    return Machine(kind, Gpu(name, int(float(memory or least) * GIB)), count)


def parse_machine(text: str) -> Machine:
    """A GPU by name or memory, several, a TPU slice, `npu`, `hpu` (with memory) or `cpu`.

    Raises Refused if it is none of these.
    """
    text = text.strip()
    if text.lower() == "cpu":
        return Machine("cpu", Gpu("the CPU", host_memory()))
    if text.lower().startswith(("npu", "hpu")):
        memory = re.fullmatch(r"(npu|hpu)(?: (\d+) ?GB)?", text, re.I)
        if memory is None:
            raise Refused(f"{text}: write npu or hpu, with its memory: {text[:3]} 64GB")
        return _chip("npu" if text[0] in "nN" else "hpu", memory[2])
    if text.partition("-")[0].lower() in (*TPU_SPECS, "v5litepod"):
        return Machine("tpu", None, topology=parse_slice(text.lower()).name)
    several = re.fullmatch(r"(\d+) ?x ?(.+)", text, re.I)
    count = int(several[1]) if several else 1
    if count < 1:
        raise Refused(f"{text}: name at least one GPU")
    return Machine("gpu", parse_gpu(several[2] if several else text), count)
