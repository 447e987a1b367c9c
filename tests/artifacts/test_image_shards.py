"""Image shards: the same samples give the same bytes, and what is read is what was written."""

import io
import tarfile
from pathlib import Path

import pytest

from artifacts.image_shards import COLUMNS, Sample, read_rows, read_tar, write_rows, write_tar


def _sample(number: int, *captions: str) -> Sample:
    meta = {"url": f"http://example.org/{number}.png", "width": 2, "height": 3}
    return Sample(f"ab_{number:05d}", b"picture %d" % number, "png", captions, meta)


SAMPLES = [_sample(0, "a cat"), _sample(1, ""), _sample(2, "ein Hund", "a dög")]


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    assert write_tar(tmp_path / "a.tar", SAMPLES) == 3
    read = list(read_tar(tmp_path / "a.tar"))
    assert [(s.key, s.image, s.extension, s.captions) for s in read] == [
        (s.key, s.image, s.extension, s.captions) for s in SAMPLES
    ]
    assert read[0].meta == SAMPLES[0].meta
    with open(tmp_path / "a.tar", "rb") as stream:
        assert list(read_tar(stream)) == read


def test_the_same_samples_give_the_same_bytes_without_clock_or_owner(tmp_path: Path) -> None:
    for name in ("a.tar", "b.tar"):
        write_tar(tmp_path / name, SAMPLES)
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    with tarfile.open(tmp_path / "a.tar") as tar:
        members = tar.getmembers()
    assert [m.name for m in members][:3] == ["ab_00000.png", "ab_00000.json", "ab_00000.txt"]
    facts = {(m.mtime, m.uid, m.gid, m.mode, m.uname, m.gname) for m in members}
    assert facts == {(0, 0, 0, 0o644, "", "")}


@pytest.mark.parametrize("keys", [("b", "a"), ("a", "a"), ("a.b",), ("../a",)])
def test_keys_out_of_order_or_unfit_are_refused(tmp_path: Path, keys: tuple[str, ...]) -> None:
    samples = [Sample(key, b"x", "png", ("",)) for key in keys]
    with pytest.raises(ValueError, match="sample key"):
        write_tar(tmp_path / "a.tar", samples)


def test_a_damaged_tar_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"not a tar at all" * 100)
    with pytest.raises(ValueError, match=r"a\.tar: not a readable tar"):
        list(read_tar(tmp_path / "a.tar"))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    with pytest.raises(ValueError, match="sample a: no picture"):
        list(read_tar(io.BytesIO(buffer.getvalue())))


def test_rows_keep_failures_and_every_column(tmp_path: Path) -> None:
    rows = [
        {"key": "a", "url": "u", "caption": "c", "status": "success", "width": 3, "height": 4},
        {"key": "b", "url": "v", "caption": None, "status": "failed", "error_message": "http 404"},
    ]
    write_rows(tmp_path / "a.parquet", rows)
    read = read_rows(tmp_path / "a.parquet")
    assert read == read_rows((tmp_path / "a.parquet").read_bytes())
    assert [list(row) for row in read] == [list(COLUMNS)] * 2
    assert read[1]["error_message"] == "http 404" and read[1]["width"] is None
