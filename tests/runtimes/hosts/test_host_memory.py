"""The memory of a host, or of its container."""

from pathlib import Path

import pytest

from runtimes import detect_hardware as module
from runtimes.detect_hardware import host_memory


def test_a_containers_limit_is_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(module, "CONTAINER_LIMIT", limit)
    machine = host_memory()
    assert machine > 2**28
    for text, expected in (("max\n", machine), ("1048576\n", 2**20), (f"{2**60}\n", machine)):
        limit.write_text(text)
        assert host_memory() == expected
