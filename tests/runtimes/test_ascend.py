"""An Ascend host is known by its files."""

from pathlib import Path

import pytest

from runtimes import ascend


def test_a_machine_without_anything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ascend, "DEVICES", tmp_path)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "none"))
    assert (ascend.count_npus(), ascend.cann_version()) == (0, None)
    assert [words.split(" (")[0].split(":")[0] for words in ascend.lacking()] == [
        "no driver",
        "no CANN",
    ]


def test_a_host_of_two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("davinci0", "davinci1", "davinci_manager"):
        (tmp_path / name).touch()
    (tmp_path / "version.cfg").write_text("runtime_running_version=[8.3.RC1:8.3.RC1]\n")
    monkeypatch.setattr(ascend, "DEVICES", tmp_path)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert (ascend.count_npus(), ascend.lacking()) == (2, [])
    assert ascend.cann_version() == "8.3.RC1"
