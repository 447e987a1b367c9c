"""The memory of NVIDIA GPUs is read from the driver's tool."""

from pathlib import Path

import pytest

from runtimes import detect_hardware
from runtimes.detect_hardware import NvidiaGpu, find_gpus, usable_gpus


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo 81559; echo 24564", [81559 * 2**20, 24564 * 2**20]),
        ("echo 'NVIDIA-SMI has failed'; exit 9", []),
        ("echo '[N/A]'", []),
    ],
)
def test_each_line_of_the_tool_is_a_gpu(
    script: str, found: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [gpu.memory for gpu in find_gpus()] == found


def test_a_machine_without_the_tool_has_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_gpus() == []


@pytest.mark.parametrize(
    ("shown", "cuda", "is_usable"),
    [
        (None, "13.0", True),
        ("1,0", "13.0", True),
        ("", "13.0", False),
        ("-1", "13.0", False),
        (None, None, False),
    ],
)
def test_gpus_that_pytorch_does_not_use_do_not_count(
    shown: str | None, cuda: str | None, is_usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    monkeypatch.setattr(detect_hardware, "torch_cuda_version", lambda: cuda)
    monkeypatch.setattr(detect_hardware, "find_gpus", lambda: [NvidiaGpu("a GPU", 1)])
    assert bool(usable_gpus()) == is_usable
