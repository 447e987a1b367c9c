"""`python -m bench.download --quick`: both sides fetch every picture of one server."""

import json

import pytest

from bench import download, picture_server


@pytest.mark.soak
def test_both_sides_download_all_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    assert download.main(["--quick", "--row", "small", "--row", "large"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["ratios"].keys() == {"rate_vs_img2dataset", "rate_large_vs_img2dataset"}
    assert found["failed"] == {}
    assert found["figures"]["small"]["ours_cpu_ms_per_picture"]["median"] > 0


def test_slow_answers_come_after_half_a_second_to_two() -> None:
    delays = [picture_server.delay(f"/small/slow/{number}.jpg") for number in range(100)]
    assert 0.5 <= min(delays) < 0.7 and 1.8 < max(delays) <= 2.0
