"""Memory and peak of a GPU are looked up by its name."""

import pytest

from configs.errors import Refused
from runtimes.torch_models.gpu_specs import GPU_SPECS, known_gpu, known_peak, parse_gpu

GIB = 2**30


def test_the_peak_of_a_chip_is_known_by_its_name() -> None:
    """By which pattern a name of PyTorch's meets first: H100 PCIe before H100, L40S and not L4.

    Figures are those of NVIDIA's data sheets, without sparsity.
    """
    assert known_peak("NVIDIA H200", "bfloat16") == 989.5e12
    assert known_peak("NVIDIA H100 80GB HBM3", "bfloat16") == 989.5e12
    assert known_peak("NVIDIA H100 PCIe", "bfloat16") == 756.5e12
    assert known_peak("NVIDIA A100-SXM4-40GB", "float32") == 19.5e12
    assert known_peak("NVIDIA L40S", "bfloat16") == 362e12
    assert known_peak("NVIDIA L4", "bfloat16") == 121e12
    assert known_peak("NVIDIA A10G", "bfloat16") == 70e12
    assert known_peak("Tesla T4", "bfloat16") is None
    assert known_peak("NVIDIA A100-SXM4-40GB", "tf32") == 156e12
    assert known_peak("Tesla T4", "tf32") == known_peak("Tesla T4", "float32")
    assert known_peak("Another chip", "bfloat16") is None


def test_the_name_of_a_gpu_selects_its_memory() -> None:
    for name, gib in {"NVIDIA A100-SXM4-40GB": 40, "NVIDIA A100-SXM4-80GB": 80}.items():
        gpu = known_gpu(name)
        assert gpu is not None and gpu.memory == gib * GIB
    assert known_gpu("NVIDIA A100 80GB PCIe") == known_gpu("NVIDIA A100-SXM4-80GB")


@pytest.mark.parametrize(
    ("text", "gib"),
    [
        *(("24GB", 24), ("24 gb", 24), ("79.5GiB", 79.5), ("24", None), ("H100", 80)),
        *(("h200", 141), ("L4", 24), ("RTX 4090", 24), ("rtx4090", 24), ("A100", 40)),
        *(("A100 80", 80), ("A100-80GB", 80), ("a100 40GB", 40), ("MI300X", 192)),
        *(("V100", 16), ("V100 32GB", 32), ("Tesla V100-SXM2-32GB", 32)),
        *(("RTX 4090 Laptop GPU", 16), ("0GB", None), ("NVIDIA H100 80GB HBM3", 80)),
        *(("8xH100", None), ("2x H100", None), ("H100,L4", None), ("H1000", None)),
        *(("B2000", None), ("RTX A6000 Ada", None), ("2080", None)),
        *(("3060", 12), ("4060 Ti 16GB", 16), ("3080 12GB", 12), ("RTX 3060 8GB", 8)),
        *(
            ("4070 Ti Super", 16),
            ("RX 7900 XTX", 24),
            ("Radeon PRO W7900", 48),
            ("9070", 16),
            ("M4 Max 64GB", 48),
        ),
        *(("5090", 32), ("4090", 24), ("A6000", 48), ("RTX-4090", 24), ("h-100", 80)),
    ],
)
def test_a_gpu_is_read_from_its_memory_or_name(text: str, gib: float | None) -> None:
    if gib is None:
        with pytest.raises(Refused, match="set its memory, such as 24GB, or one of"):
            parse_gpu(text)
    else:
        assert parse_gpu(text).memory == gib * GIB


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("4060 Ti", "RTX 4060 Ti 8GB or RTX 4060 Ti 16GB"),
        ("NVIDIA GeForce RTX 3080", "RTX 3080 10GB or RTX 3080 12GB"),
    ],
)
def test_a_card_that_is_sold_with_two_memories_is_asked_for(text: str, choices: str) -> None:
    with pytest.raises(Refused, match=f"write {choices}$"):
        parse_gpu(text)


def test_a_mac_needs_the_memory_that_its_gpu_shares() -> None:
    with pytest.raises(Refused, match="add the machine's memory, such as M4 Pro 32GB"):
        parse_gpu("M4 Pro")


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA GeForce RTX 3060", "RTX 3060"),
        ("NVIDIA GeForce RTX 3060 Ti", "RTX 3060 Ti"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti SUPER"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", "RTX 4070 Laptop"),
        ("AMD Radeon RX 7900 XTX", "RX 7900 XTX"),
    ],
)
def test_a_device_is_not_taken_for_its_larger_siblings(device: str, name: str) -> None:
    assert (gpu := known_gpu(device)) is not None and gpu.name == name


def test_a_memory_without_its_unit_is_told_to_have_one() -> None:
    with pytest.raises(Refused, match="gpu 48: set its memory, such as 48GB, or one of"):
        parse_gpu("48")


@pytest.mark.parametrize(
    ("text", "has"),
    [
        *(("A100 24GB", 40), ("H100 40GB", 80), ("H100 94GB", 80), ("A100 0GB", 40)),
        ("GH200 480GB", 141),  # the memory of its CPU
    ],
)
def test_a_name_with_another_memory_is_refused(text: str, has: int) -> None:
    with pytest.raises(Refused, match=f"^gpu {text}: .* has {has} GB: give the name alone"):
        parse_gpu(text)


def test_every_gpu_of_the_table_is_read_by_its_own_name() -> None:
    for gpu in GPU_SPECS:
        assert parse_gpu(gpu.name).spec is gpu
