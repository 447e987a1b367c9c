"""Datasets with embedded pictures, in folders and on the hub, as sources."""

import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import HubServer, Repository
from huggingface_hub import HfFileSystem
from source_rows import context, make_recipe, parquet, png, rows_of, write_list

from configs.errors import Away, Refused
from tasks import download
from tasks.download import folders, sources
from tasks.download.lists import PictureLocation
from tasks.download.shard import download_shard

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


def test_a_picture_that_changes_after_it_was_planned_is_not_committed(tmp_path: Path) -> None:
    file = Path(write_list(tmp_path / "a.parquet", [{"image": png(1), "text": ""}] * 9))
    recipe = make_recipe({"kind": "dataset", "path": str(file)}, tmp_path / "store")
    shard = download.plan(recipe).shards[0]
    for changed in ([{"image": png(2), "text": ""}] * 9, [{"image": png(1), "text": ""}]):
        write_list(file, changed)
        with pytest.raises(Refused, match="it changed while it was being read"):
            download_shard(shard, context(recipe))
    assert not (tmp_path / "store/download").exists()


def test_a_dataset_has_embedded_pictures(tmp_path: Path) -> None:
    struct = [{"image": {"bytes": png(n), "path": None}, "text": f"{n}"} for n in range(6)]
    plain = [{"image": png(n), "text": f"{n}"} for n in range(6)]
    (tmp_path / "in").mkdir()
    keys = []
    for rows in (struct, plain):
        write_list(tmp_path / "in/train-00000-of-00001.parquet", rows)
        write_list(tmp_path / "in/test-00000-of-00001.parquet", rows[:1])
        recipe = make_recipe({"kind": "dataset", "path": str(tmp_path / "in")})
        read = rows_of(recipe, tmp_path)
        assert [row.captions for row in read] == [(f"{n}",) for n in range(6)]
        assert [Path(row.file or "").read_bytes() for row in read] == [png(n) for n in range(6)]
        keys.append([shard.key for shard in download.plan(recipe).shards])
    assert keys[0] == keys[1]


def test_a_later_file_without_the_caption_column_is_refused(tmp_path: Path) -> None:
    write_list(tmp_path / "train-0.parquet", [{"image": png(0), "text": "a fox"}])
    write_list(tmp_path / "train-1.parquet", [{"image": png(1), "caption": "a cat"}])
    recipe = make_recipe({"kind": "dataset", "path": str(tmp_path)})
    with pytest.raises(Refused, match=r"caption_column: .*train-1\.parquet has no column 'text'"):
        download.plan(recipe)


@pytest.mark.parametrize("folder", ["train_pictures", "train"])
def test_the_name_of_a_datasets_folder_selects_no_split(tmp_path: Path, folder: str) -> None:
    place = tmp_path / folder
    place.mkdir()
    for number, name in enumerate(("train-0.parquet", "test-0.parquet")):
        write_list(place / name, [{"image": png(number), "text": name}])
    recipe = make_recipe({"kind": "dataset", "path": str(place)})
    assert [row.captions for row in rows_of(recipe, tmp_path)] == [("train-0.parquet",)]


SPLITS = ("test", "test_unique", "test-hard", "tests", "my.test")


@pytest.mark.parametrize(
    "form",
    [
        *("{}-00000-of-00001.parquet", "data/{}-00000-of-00002-a1b2c3d4.parquet", "{}.parquet"),
        *("{}-0.PARQUET", "{}_00001.parquet", "{}.7.parquet", "{}/0000.parquet"),
        "default/{}/0000.parquet",
    ],
)
def test_a_split_is_a_whole_name(tmp_path: Path, form: str) -> None:
    for split in SPLITS:
        file = tmp_path / "in" / form.format(split)
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"image": [split.encode()], "text": [split]}), file)
    for split in SPLITS:
        recipe = make_recipe({"kind": "dataset", "path": f"{tmp_path}/in", "split": split})
        assert [row.captions for row in rows_of(recipe, tmp_path)] == [(split,)]


def test_a_number_in_front_of_a_shard_s_is_of_the_split(tmp_path: Path) -> None:
    splits = ("test", "test_2")
    for split in splits:
        file = tmp_path / f"{split}-00000-of-00001.parquet"
        pq.write_table(pa.table({"image": [split.encode()], "text": [split]}), file)
    for split in splits:
        recipe = make_recipe({"kind": "dataset", "path": str(tmp_path), "split": split})
        assert [row.captions for row in rows_of(recipe, tmp_path)] == [(split,)]
    with pytest.raises(Refused, match=r"no files of split 'tes' \(test-0.*glob of its files"):
        download.plan(make_recipe({"kind": "dataset", "path": str(tmp_path), "split": "tes"}))


@pytest.mark.parametrize(
    ("split", "other"),
    [("fold_1", "fold_10"), ("train_1", "train_100"), ("v1", "v12"), ("train", "train2017")],
)
def test_a_number_behind_a_split_has_a_separator(tmp_path: Path, split: str, other: str) -> None:
    numbered = [f"{split}.parquet", f"{split}-0.parquet", f"{split}_00_1.parquet"]
    (tmp_path / "in").mkdir()
    for name in (*numbered, f"{other}.parquet"):
        write_list(tmp_path / "in" / name, [{"image": png(0), "text": name}])
    recipe = make_recipe({"kind": "dataset", "path": f"{tmp_path}/in", "split": split})
    captions = {row.captions[0] for row in rows_of(recipe, tmp_path)}
    assert captions == set(numbered)


@pytest.mark.parametrize("digits", ["1" * 26, "-1" * 26, "-" + "1" * 26])
def test_a_file_s_name_of_many_digits_takes_no_time(digits: str) -> None:
    """Some patterns of digits take twice the time for each digit more."""
    start = time.process_time()
    assert not folders._is_of_split(f"train{digits}x.parquet", "train")
    assert time.process_time() - start < 1  # seconds


def test_a_folder_of_one_split_is_that_split(tmp_path: Path) -> None:
    place = tmp_path / "train"
    place.mkdir()
    write_list(place / "0.parquet", [{"image": png(0), "text": "a"}])
    assert rows_of(make_recipe({"kind": "dataset", "path": str(place)}), tmp_path)
    with pytest.raises(Refused, match="has no files of split 'test'"):
        download.plan(make_recipe({"kind": "dataset", "path": str(place), "split": "test"}))


def test_pictures_of_a_dataset_come_in_the_order_of_their_places(tmp_path: Path) -> None:
    """A plan of another machine may have rows at places that repeat or go back."""
    file = str(tmp_path / "a.parquet")
    pictures = [b"picture %d" % n for n in range(5)]
    pq.write_table(pa.table({"image": pictures, "text": [""] * 5}), file)
    recipe = make_recipe({"kind": "dataset", "path": file})
    source: Any = sources.SOURCES["dataset"](recipe.source)
    places = [PictureLocation(file, row) for row in (1, 3, 3, 0, 4, 2)]
    assert list(source.pictures(places)) == [pictures[place.row or 0] for place in places]


def test_an_unchanged_dataset_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path(
        write_list(tmp_path / "a.parquet", [{"image": png(n), "text": ""} for n in range(6)])
    )
    recipe = make_recipe({"kind": "dataset", "path": str(file)}, tmp_path / "store")
    first = download.plan(recipe)
    reads: list[str] = []
    read = folders.parquet_rows
    monkeypatch.setattr(folders, "parquet_rows", lambda *a: reads.append(a[0]) or read(*a))
    assert download.plan(recipe) == first
    assert reads == []
    for damaged in (tmp_path / "store/plan/shards").iterdir():  # is not used
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert download.plan(recipe).source_digest == first.source_digest
    assert reads == [str(file)]
    write_list(file, [{"image": png(n), "text": ""} for n in range(1, 7)])
    assert download.plan(recipe).source_digest != first.source_digest


@pytest.fixture
def pictures(hub: HubServer) -> Repository:
    """A dataset of six pictures on the hub."""
    rows = [{"image": {"bytes": png(n), "path": None}, "text": f"{n}"} for n in range(6)]
    hub.repositories["datasets/some/pictures"] = Repository(
        {
            "README.md": b"Pictures",
            "data/test-00000-of-00001.parquet": parquet(rows[:1]),
            "data/train-00000-of-00002.parquet": parquet(rows[:4]),
            "data/train-00001-of-00002.parquet": parquet(rows[4:]),
        }
    )
    return hub.repositories["datasets/some/pictures"]


def test_a_dataset_of_the_hub_is_read_once_until_it_changes(
    hub: HubServer, pictures: Repository, tmp_path: Path
) -> None:
    recipe = make_recipe({"kind": "dataset", "path": "some/pictures"})
    assert [row.captions for row in rows_of(recipe, tmp_path)] == [(f"{n}",) for n in range(6)]
    first, old = download.plan(recipe), pictures.commit

    def next_run() -> tuple[Any, set[str]]:
        """The plan of another process, and the files that it reads."""
        HfFileSystem.clear_instance_cache()
        before = len(hub.requests)
        planned = download.plan(recipe)
        read = [path for _, path in hub.requests[before:] if path.startswith("/large/")]
        return planned, {path.rpartition("/")[2] for path in read}

    names = {"train-00000-of-00002.parquet"}  # for its columns
    assert next_run() == (first, names)
    changed = [{"image": png(9), "text": "new"}]
    pictures.files = {**pictures.files, "data/train-00001-of-00002.parquet": parquet(changed)}
    second, read = next_run()
    assert second.source_digest != first.source_digest
    assert read == {*names, "train-00001-of-00002.parquet"}
    assert pictures.commit != old


def test_an_unavailable_hub_dataset_is_a_one_line_error(
    hub: HubServer, pictures: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the client's own attempts

    def refused(error_kind: type[Exception] = Refused, **source: str) -> str:
        HfFileSystem.clear_instance_cache()
        with pytest.raises(error_kind) as error:
            download.plan(make_recipe({"kind": "dataset", "path": "some/pictures", **source}))
        line = str(error.value)
        assert line.startswith("source") and "\n" not in line
        return line

    assert "hf://datasets/no/pictures: no such file" in refused(path="no/pictures")
    assert "hf://datasets/some/pictures@gone: no such file" in refused(revision="gone")
    pictures.accepted_by = {"hf_mine"}
    assert "Cannot access gated repo" in refused()
    hub.fault = 500
    folder = {"kind": "folder", "path": "hf://datasets/a/pictures"}
    for source in ({}, folder):
        said = refused(Away, **source)
        assert "cannot be read now (Server error '500 Internal Server Error'" in said
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be read now (" in refused(Away)
