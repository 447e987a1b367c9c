"""`python -m bench.download --quick`: both sides fetch every picture of one server."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench import download, picture_server


@pytest.mark.soak
def test_both_sides_download_all_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    assert download.main(["--quick", "--row", "small", "--row", "large"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["ratios"].keys() == {"rate_vs_img2dataset", "rate_large_vs_img2dataset"}
    assert found["failed"] == {}
    assert found["figures"]["small"]["ours_cpu_ms_per_picture"]["median"] > 0


def test_both_sides_have_equal_connections_to_a_slow_server() -> None:
    """The number of connections bounds the rate there."""
    slow = [download.WORKLOADS[name] for name in ("slow", "slow, 256 threads")]
    assert [workload.connections for workload in slow] == [128, 512]
    assert all(w.connections == w.threads * w.processes for w in slow)
    assert download.WORKLOADS["slow, equal memory"] == replace(
        slow[0], ratio="rate_slow_equal_memory", connections=512
    )


def test_a_later_round_that_lacks_pictures_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("seconds", "pictures_per_second", "cpu_ms_per_picture", "peak_mib", "whole_seconds")
    counts: Iterator[int] = iter((6, 6, 6, 5))  # of theirs, ours, ours, theirs

    def measured(*_: object) -> dict[str, float]:
        return {**dict.fromkeys(names, 1.0), "pictures": next(counts)}

    monkeypatch.setattr(download, "_measured", measured)
    workload = replace(download.WORKLOADS["small"], pictures=6)
    row = download._row("small", workload, "host", tmp_path, rounds=2)
    assert row.failed == "img2dataset has 5 of 6 pictures"


def test_slow_answers_come_after_half_a_second_to_two() -> None:
    delays = [picture_server.delay(f"/small/slow/{number}.jpg") for number in range(100)]
    assert 0.5 <= min(delays) < 0.7 and 1.8 < max(delays) <= 2.0
