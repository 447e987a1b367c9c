"""A Gaudi host is known by its files."""

from pathlib import Path

import pytest

from runtimes import detect_hardware as runtimes_host


@pytest.fixture(autouse=True)
def _nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runtimes_host, "HPU_DEVICES", tmp_path / "accel")
    monkeypatch.setattr(runtimes_host, "HPU_MODULE", tmp_path / "habanalabs")


def test_a_machine_without_anything() -> None:
    assert (
        runtimes_host.count_hpus(),
        runtimes_host.hpu_driver_version(),
        runtimes_host.hpu_bridge_version(),
    ) == (0, None, None)
    assert [words.split(" (")[0] for words in runtimes_host.missing_for_hpu()] == [
        "no driver",
        "no habana_frameworks: use Intel's container",
    ]


def test_a_host_of_two_beside_another_accelerator(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for number, vendor in enumerate(("0x1da3", "0x1da3", "0x8086")):
        folder = tmp_path / f"accel/accel{number}/device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
    (tmp_path / "habanalabs").mkdir()
    assert runtimes_host.hpu_driver_version() == "unknown"
    (tmp_path / "habanalabs/version").write_text("1.23.0-695\n")
    host = Path(__file__).parents[2] / "hpu_host"
    monkeypatch.syspath_prepend(str(host))
    assert (runtimes_host.count_hpus(), runtimes_host.hpu_driver_version()) == (2, "1.23.0-695")
    assert (runtimes_host.hpu_bridge_version(), runtimes_host.missing_for_hpu()) == (
        "1.23.0+emulated",
        [],
    )
