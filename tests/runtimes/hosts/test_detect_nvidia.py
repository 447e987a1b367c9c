"""The memory of NVIDIA GPUs is read from the driver's tool."""

from pathlib import Path

import pytest

from runtimes.hosts.detect_nvidia import gpu_memory


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
    assert gpu_memory() == found


def test_a_machine_without_the_tool_has_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_memory() == []
