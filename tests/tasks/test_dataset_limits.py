"""Checks of a download's data: each share is right, and a limit of the recipe blocks the stage."""

import hashlib
from typing import Any

import pytest

from configs.errors import Failed
from configs.settings.data import Download
from tasks.download.data_quality import (
    DownloadStatistics,
    check_data,
    shard_statistics,
    warn_of_captions,
)
from tasks.download.rows import Row, text_of_file


def facts(pictures: list[int | None], planned: int = 100, host: str = "a") -> dict[str, Any]:
    """Facts of a shard with these pictures; None is a failed row. Equal numbers, equal bytes."""
    rows = [Row(f"http://{host}/{n}", ("x" * (n % 3),)) for n in range(len(pictures))]
    outcomes = [
        {"status": "failed_to_download", "error_message": "timeout"}
        if number is None
        else {
            "status": "success",
            "sha256": hashlib.sha256(str(number).encode()).hexdigest(),
            "width": 512,
            "height": 400 if number % 2 else 512,
        }
        for number in pictures
    ]
    costs = [(0.5, 1000)] * len(rows)
    return shard_statistics(rows, outcomes, costs, Download(image_size=512), planned)


def test_a_host_took_the_time_of_all_downloads_of_a_shard() -> None:
    rows = [Row("http://a/0", ("",))]
    outcomes, costs = [{"status": "failed_to_download", "error_message": "timeout"}], [(2.0, 5)]
    first = shard_statistics(rows, outcomes, costs, Download(), 1)
    rows = [Row("0", ("",))]  # the same picture, on the base
    given = (rows, outcomes, [(1.0, 7)], Download(), 1)
    again = shard_statistics(*given, earlier=first, base_url="http://a")
    assert (again["hosts"], again["bytes"], again["fetched"]) == ({"a": [1, 1, 3000]}, 12, 7)


def statistics(*shards: dict[str, Any]) -> DownloadStatistics:
    found = DownloadStatistics()
    for shard in shards:
        found.add(shard)
    return found


def test_duplicates_are_found_within_and_across_shards() -> None:
    assert statistics(facts([1, 2, 2, None])).duplicates() == pytest.approx(1 / 3)
    assert statistics(facts([1, 2]), facts([2, 3])).duplicates() == pytest.approx(1 / 4)
    assert statistics(facts([None])).duplicates() == 0


def test_of_millions_of_pictures_a_sample_by_hash_tells_the_share_of_duplicates() -> None:
    twice = [number // 2 for number in range(4000)]
    sampled = facts(twice, planned=10_000_000)
    assert 300 < len(sampled["hashes"]) < 500
    assert statistics(sampled).duplicates() == pytest.approx(1 / 2)
    assert statistics(sampled, facts([1, 2])).duplicates() == pytest.approx(1 / 2, abs=0.01)


def test_failing_and_slow_hosts_are_named() -> None:
    found = statistics(facts([1, None, None], host="down"), facts([1] * 9, host="slow")).summary()
    (down,) = found["failing_hosts"]
    assert down == {"host": "down", "rows": 3, "failed": 2, "seconds per row": 0.5}
    assert [host["host"] for host in found["slowest_hosts"]] == ["slow", "down"]


def test_a_few_failed_rows_are_named_by_reason_and_without_secrets() -> None:
    reasons = ["http 404"] * 5 + ["not an image", "http 403"]
    outcomes = [{"status": "failed_to_download", "error_message": reason} for reason in reasons]
    rows = [Row(f"http://user:word@a/{n}?Signature=sesame&w=1", ("",)) for n in range(5)]
    rows += [Row("sha256:00", ("",), place="/pictures/fox.png"), Row("", ("a fox",))]
    shard = shard_statistics(rows, outcomes, [(1.0, 0)] * 7, Download(), 7)
    found = statistics(shard, shard).summary()["examples"]
    assert found == {
        "http 404": [f"http://a/{n}?Signature=...&w=1" for n in range(3)],
        "not an image": ["/pictures/fox.png", "/pictures/fox.png"],
        "http 403": ["the row of caption 'a fox'"] * 2,
    }
    long = shard_statistics(
        [Row(f"http://a/{'x' * 9000}", ("",))], outcomes[:1], [(1.0, 0)], Download(), 1
    )
    assert len(long["examples"]["http 404"][0]) == 200


def test_captions_that_are_no_utf8_are_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    latin = text_of_file("ein Bär".encode("latin-1"))
    rows = [Row("", (latin,), place=f"/pictures/{n}.png") for n in range(5)]
    rows += [Row("", ("ein Bär", latin), place="/list:9"), Row("", ("ein Bär",))]
    done = {"status": "success", "sha256": "0" * 64, "width": 9, "height": 9}
    failed = {"status": "failed_to_download", "error_message": "timeout"}
    shard = shard_statistics(rows, [failed, *[done] * 6], [(1.0, 0)] * 7, Download(), 7)
    summary = {"data": statistics(shard, shard).summary()}
    named = [f"/pictures/{n}.png" for n in (1, 2, 3)]
    assert summary["data"]["illegible"] == {"rows": 10, "examples": named}
    warn_of_captions(summary)
    assert f"captions of 10 pictures have U+FFFD in place of letters ({named[0]}," in caplog.text
    caplog.clear()
    whole = shard_statistics(rows[-1:], [done], [(1.0, 0)], Download(), 1)
    warn_of_captions({"images": 1, "data": statistics(whole).summary()})
    assert not caplog.text


def test_pictures_without_a_caption_are_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    rows = [Row("", (text,), place=f"/pictures/{n}.png") for n, text in enumerate(["", "a", " "])]
    done = {"status": "success", "sha256": "0" * 64, "width": 9, "height": 9}
    shard = shard_statistics(rows, [done] * 3, [(1.0, 0)] * 3, Download(), 3)
    warn_of_captions({"images": 3, "data": statistics(shard).summary()})
    named = "/pictures/0.png, /pictures/2.png"
    assert f"download: 2 of 3 pictures have no caption ({named}) and train unco" in caplog.text
    caplog.clear()
    warn_of_captions({"images": 3, "data": statistics(shard).summary()}, expected=False)
    assert not caplog.text


def test_facts_of_a_shard_are_small_however_many_hosts_it_has() -> None:
    rows = [Row(f"http://host{n}/", ("",)) for n in range(1000)]
    outcomes = [{"status": "failed_to_download"}] * 1000
    found = shard_statistics(rows, outcomes, [(1.0, 0)] * 1000, Download(), 1000)
    assert len(found["hosts"]) <= 16


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ({"max_duplicates": 0.2}, "25.0% of the pictures repeat another one"),
        ({"max_short_captions": 0.4, "min_caption_length": 2}, "of less than 2 characters"),
        ({"max_undersized": 0.2}, "50.0% of the pictures have a side below 512 pixels"),
        ({"max_failed": 0.1}, "1 of 5 rows failed"),
    ],
)
def test_each_check_blocks_above_its_limit_alone(limits: dict[str, Any], problem: str) -> None:
    data = statistics(facts([1, 2, 2, 3, None])).summary()
    summary = {"rows": 5, "images": 4, "outcomes": {"success": 4, "timeout": 1}, "data": data}
    check_data(summary, Download(image_size=512))
    (setting,) = (name for name in limits if name.startswith("max_"))
    with pytest.raises(Failed, match=problem) as raised:
        check_data(summary, Download(image_size=512, **limits))
    assert f"download.{setting} allows" in str(raised.value)
