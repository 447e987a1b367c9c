"""The demo's dataset folder: the same bytes every time, and wholly there or not at all."""

import hashlib
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from digit_prompts import judge
from PIL import Image

from demo import captions, dataset
from demo.captions import BASE_STYLES, NEW_STYLE, STYLES
from demo.digit_judges import _distance_from_paper, nearest_style

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dataset.write(tmp_path_factory.mktemp("demo") / "digits")


def rows_of(urls: Path) -> list[dict[str, str]]:
    return pq.read_table(urls).to_pylist()


def test_every_row_names_a_picture_with_that_hash(urls: Path) -> None:
    rows = rows_of(urls)
    assert set(rows[0]) == {"url", "caption", "sha256"}
    assert len({row["url"] for row in rows}) == len({row["sha256"] for row in rows}) == len(rows)
    for row in rows:
        png = (urls.parent / row["url"]).read_bytes()
        assert hashlib.sha256(png).hexdigest() == row["sha256"]
    assert len(list((urls.parent / "images").iterdir())) == len(rows)


def test_new_pictures_are_two_thirds_and_the_rehearsal_covers_every_base_style(urls: Path) -> None:
    styles = Counter(
        STYLES[captions.parse(row["caption"]).styles()[0]].name for row in rows_of(urls)
    )
    assert styles.pop(NEW_STYLE) == 1797
    assert set(styles) == set(BASE_STYLES)
    assert styles.total() == dataset.REHEARSAL
    assert max(styles.values()) - min(styles.values()) <= 1


def test_a_dataset_without_the_new_style_has_base_styles_alone(tmp_path: Path) -> None:
    rows = rows_of(dataset.write(tmp_path / "digits", count=0, rehearsal=200))
    styles = {STYLES[captions.parse(row["caption"]).styles()[0]].name for row in rows}
    assert len(rows) == 200 and styles == set(BASE_STYLES)


def test_the_same_digits_are_drawn_on_a_black_board(tmp_path: Path) -> None:
    green = rows_of(dataset.write(tmp_path / "green", count=40, rehearsal=10))
    style = "white chalk on a black board"
    black = rows_of(dataset.write(tmp_path / "black", count=40, rehearsal=10, style=style))
    assert [row["caption"].replace("a green", "a black") for row in green] == [
        row["caption"] for row in black
    ]
    images = np.stack([np.asarray(Image.open(tmp_path / "black" / row["url"])) for row in black])
    assert judge(images, [row["caption"] for row in black])["style"].all()
    changed = dataset.write(tmp_path / "green", count=40, rehearsal=10, style=style)
    assert rows_of(changed) == black


def test_a_reference_has_the_same_strokes_in_ink_and_the_caption_names_no_digit(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "edit"
    urls = dataset.write(folder, count=60, rehearsal=20, references=True)
    rows = rows_of(urls)
    both = [
        np.stack([np.asarray(Image.open(folder / row[name])) for row in rows])
        for name in ("url", "reference")
    ]
    masks = [_distance_from_paper(pictures)[0] for pictures in both]
    strokes = [mask / mask.max(axis=(1, 2), keepdims=True) for mask in masks]
    alike = [np.corrcoef(a.ravel(), b.ravel())[0, 1] for a, b in zip(*strokes, strict=True)]
    assert min(alike) > 0.9
    asked = [captions.parse(row["caption"], has_reference=True) for row in rows]
    assert all(each.digit is None for each in asked)
    found = nearest_style(both[0])
    assert all(style in each.styles() for style, each in zip(found, asked, strict=True))
    shown = nearest_style(both[1])
    assert {STYLES[style].name for style in shown} <= set(BASE_STYLES)
    assert not (shown == found).any(), "an edit changes the style"


def test_a_lost_reference_is_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "edit"
    dataset.write(folder, count=9, rehearsal=0, references=True)
    before = (folder / "references/00003.png").read_bytes()
    (folder / "references/00003.png").write_bytes(b"torn")
    dataset.write(folder, count=9, rehearsal=0, references=True)
    assert (folder / "references/00003.png").read_bytes() == before


def test_a_larger_count_adds_rows_and_keeps_the_others_in_their_order(tmp_path: Path) -> None:
    small, large = (
        rows_of(dataset.write(tmp_path / str(count), count=count, rehearsal=30))
        for count in (40, 60)
    )
    known = [row for row in large if row in small]
    assert known == small and len(large) == len(small) + 20


def test_captions_say_what_the_pictures_show(urls: Path) -> None:
    rows = rows_of(urls)[:500]
    images = np.stack([np.asarray(Image.open(urls.parent / row["url"])) for row in rows])
    right = judge(images, [row["caption"] for row in rows])
    assert right["digit"].mean() > 0.98  # most were in the judge's own training split
    assert right["style"].all()


def test_two_writes_give_the_same_bytes(tmp_path: Path) -> None:
    first, again = (dataset.write(tmp_path / n, count=90, rehearsal=30) for n in ("a", "b"))
    assert again.read_bytes() == first.read_bytes()


def test_another_seed_gives_other_pictures(urls: Path, tmp_path: Path) -> None:
    other = rows_of(dataset.write(tmp_path / "other", seed=1, count=180, rehearsal=20))
    assert len(other) == 200
    assert not {row["sha256"] for row in other} & {row["sha256"] for row in rows_of(urls)}


def test_a_finished_folder_is_left_alone_and_another_recipe_replaces_it(tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    urls = dataset.write(folder, count=90, rehearsal=0)
    written = urls.stat().st_mtime_ns
    assert dataset.write(folder, count=90, rehearsal=0).stat().st_mtime_ns == written
    assert len(rows_of(dataset.write(folder, count=90, rehearsal=20))) == 110
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]  # nothing temporary stays


@pytest.mark.parametrize("lost", ["images/00003.png", "urls.parquet", "recipe.json"])
@pytest.mark.parametrize("data", [None, b"torn"])
def test_what_is_damaged_or_lost_is_written_again(
    tmp_path: Path, lost: str, data: bytes | None
) -> None:
    folder = tmp_path / "digits"
    dataset.write(folder, count=9, rehearsal=3)
    before = {path: path.read_bytes() for path in folder.rglob("*.*")}
    (folder / lost).write_bytes(data) if data else (folder / lost).unlink()
    if lost == "recipe.json" and data is None:  # then nothing says that the folder is ours
        with pytest.raises(FileExistsError):
            dataset.write(folder, count=9, rehearsal=3)
        return
    dataset.write(folder, count=9, rehearsal=3)
    assert {path: path.read_bytes() for path in folder.rglob("*.*")} == before
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]


def test_writers_at_the_same_time_all_succeed(tmp_path: Path) -> None:
    folder, start = tmp_path / "digits", threading.Barrier(4)

    def write(_: int) -> bytes:
        start.wait()
        return dataset.write(folder, count=9, rehearsal=3).read_bytes()

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(write, range(4)))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]


def test_the_second_builder_keeps_the_first_one_s_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, folder = dataset._fill, tmp_path / "digits"

    def overtaken(*arguments: Any) -> None:
        fill(*arguments)
        monkeypatch.setattr(dataset, "_fill", fill)
        made.append(dataset.write(folder, count=9, rehearsal=3).stat().st_ino)

    made: list[int] = []
    monkeypatch.setattr(dataset, "_fill", overtaken)
    assert [dataset.write(folder, count=9, rehearsal=3).stat().st_ino] == made


def test_a_folder_of_someone_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="choose an empty or a new folder"):
        dataset.write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(picture: object) -> bytes:
        raise OSError("disk full")

    monkeypatch.setattr(dataset, "_png", broken)
    with pytest.raises(OSError, match="disk full"):
        dataset.write(tmp_path / "digits")
    assert list(tmp_path.iterdir()) == []
