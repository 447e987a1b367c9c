"""An Ascend host is known by its files."""

from pathlib import Path

import pytest

from runtimes import detect_hardware


def test_a_machine_without_anything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(detect_hardware, "NPU_DEVICES", tmp_path)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "none"))
    assert (detect_hardware.count_npus(), detect_hardware.cann_version()) == (0, None)
    assert [words.split(" (")[0].split(":")[0] for words in detect_hardware.missing_for_npu()] == [
        "no driver",
        "no CANN",
    ]


def test_a_host_of_two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("davinci0", "davinci1", "davinci_manager"):
        (tmp_path / name).touch()
    said = "# version: 1.0\nruntime_running_version=[7.6.0.1.220:8.0.0]\n"
    (tmp_path / "version.cfg").write_text(said)
    monkeypatch.setattr(detect_hardware, "NPU_DEVICES", tmp_path)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert (detect_hardware.count_npus(), detect_hardware.missing_for_npu()) == (2, [])
    assert detect_hardware.cann_version() == "8.0.0"


@pytest.mark.parametrize(
    ("name", "said", "version"),
    [
        ("version.cfg", "toolkit_running_version=[8.3.RC2]\n", "8.3.RC2"),
        ("version.cfg", "toolkit_running_version=[7.5.0.1.129:8.0.RC3]\n", "8.0.RC3"),
        (
            "aarch64-linux/ascend_toolkit_install.info",
            "package_name=Ascend-cann-toolkit\nversion=8.2.RC1\n"
            "innerversion=V100R001C22SPC001B231\n",
            "8.2.RC1",
        ),
        (
            "version.cfg",
            "# version: 1.0\n"
            "runtime_running_version=[7.6.T13.0.B094:8.0.T63]\n"
            "toolkit_running_version=[7.6.T13.0.B094:8.0.T63]\n"
            "runtime_upgrade_version=[7.6.T13.0.B094:8.0.T63]\n",
            "8.0.T63",
        ),
        (
            "x86_64-linux/ascend_toolkit_install.info",
            "package_name=Ascend-cann-toolkit\nversion=9.2.0-beta.2\narch=x86_64\nos=linux\n",
            "9.2.0-beta.2",
        ),
        ("version.cfg", "# version: 1.0\n", "unknown"),
    ],
)
def test_the_release_of_cann_is_reported(
    name: str, said: str, version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the lines that users show of CANN 8.0 to 9.2 in public bug reports."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(said)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert detect_hardware.cann_version() == version
