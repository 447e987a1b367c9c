"""References of every kind of source, in order: which picture has which, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from picture_bytes import plain_picture
from picture_server import Web
from referenced_data import encoded, recipe_of
from source_rows import write_list
from tar_sources import packed

from artifacts.store import Store
from configs.errors import Refused
from configs.settings.recipe import Recipe
from tasks import download
from tasks.download.lists import PictureLocation
from tasks.download.shard_plan import plan_key, read_spans
from tasks.download.sources import SOURCES, planned_references

pytestmark = pytest.mark.usefixtures("own_cache")
Named = dict[str, list[Any]]  # caption -> references


def picture(red: int) -> bytes:
    return plain_picture(16, 16, red)


def sourced(source: dict[str, Any], tmp_path: Path) -> Recipe:
    (tmp_path / "store").mkdir(exist_ok=True)
    return recipe_of(tmp_path / "store", tmp_path, source)


def named(recipe: Recipe) -> Named:
    """The references of each picture as the plan has them: URLs, or the bytes of files."""
    source = SOURCES[recipe.source.kind](recipe.source)
    source.check()
    plan = download.plan(recipe)
    captions = {
        (spec.key, number): captions[0]
        for spec in plan.shards
        for number, captions in enumerate(
            read_spans(spec.spans, plan_key())["captions"].to_pylist()
        )
    }
    found: Named = {caption: [] for caption in captions.values()}
    rows = [*planned_references(plan)]
    embedded = [PictureLocation(p["file"], p["row"]) for _, p in rows if p["file"] is not None]
    pictures = source.references(embedded)
    for row, place in rows:
        found[captions[row]].append(place["url"] if place["file"] is None else next(pictures))
    return found


@pytest.mark.parametrize("format", ["parquet", "csv", "jsonl", "json"])
def test_columns_of_a_list_have_urls_or_lists_of_urls(tmp_path: Path, format: str) -> None:
    rows = [
        {"url": "a", "caption": "0", "one": "x", "more": ["y", "", "z"]},
        {"url": "b", "caption": "1", "one": "", "more": []},
        {"url": "c", "caption": "2", "one": "x", "more": None},
    ]
    expected = {"0": ["x", "y", "z"], "1": [], "2": ["x"]}
    if format == "csv":  # which has no lists
        rows = [{**row, "more": (row["more"] or [""])[0]} for row in rows]
        expected["0"] = ["x", "y"]
    path = write_list(tmp_path / f"list.{format}", rows)
    source = {"kind": "urls", "path": str(path), "format": format}
    assert named(sourced({**source, "reference_columns": ["one", "more"]}, tmp_path)) == expected
    swapped = named(sourced({**source, "reference_columns": ["more", "one"]}, tmp_path))
    assert swapped == {"0": [*expected["0"][1:], "x"], "1": [], "2": ["x"]}


def test_references_are_no_part_of_a_row_and_change_no_shard(tmp_path: Path) -> None:
    rows = [{"url": f"{n}", "caption": str(n), "one": f"x{n}"} for n in range(40)]
    path = write_list(tmp_path / "list.parquet", rows)
    source = {"kind": "urls", "path": str(path)}
    keys = [
        [spec.key for spec in download.plan(sourced({**source, **more}, tmp_path)).shards]
        for more in ({}, {"reference_columns": ["one"]}, {"reference_columns": ["one", "one"]})
    ]
    assert keys[0] == keys[1] == keys[2] and len(keys[0]) > 1


def test_columns_of_a_data_set_have_pictures_or_lists_of_pictures(tmp_path: Path) -> None:
    table = {
        "image": [picture(n) for n in range(3)],
        "text": ["0", "1", "2"],
        "one": [{"bytes": picture(10), "path": None}, None, {"bytes": picture(12), "path": None}],
        "more": [[picture(20), picture(21)], [], None],
    }
    pq.write_table(pa.table(table), tmp_path / "data.parquet", row_group_size=2)
    source = {"kind": "dataset", "path": str(tmp_path / "data.parquet")}
    recipe = sourced({**source, "reference_columns": ["more", "one"]}, tmp_path)
    assert named(recipe) == {
        "0": [picture(20), picture(21), picture(10)],
        "1": [],
        "2": [picture(12)],
    }


def test_files_of_a_tar_s_samples_are_references(tmp_path: Path) -> None:
    files = [
        *(("0.png", picture(0)), ("0.txt", b"0"), ("0.ref1.png", picture(10))),
        *(("0.ref2.png", picture(11)), ("1.png", picture(1)), ("1.txt", b"1")),
        *(("2.png", picture(2)), ("2.txt", b"2"), ("2.ref2.png", picture(12))),
    ]
    path = packed(tmp_path / "a.tar", files)
    source = {"kind": "tars", "path": str(path), "reference_extensions": ["ref1.png", "ref2.png"]}
    assert named(sourced(source, tmp_path)) == {
        "0": [picture(10), picture(11)],
        "1": [],
        "2": [picture(12)],
    }


def write_files(folder: Path, files: dict[str, bytes | str]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return folder


TARGETS: dict[str, bytes | str] = {
    name: data
    for n in range(3)
    for name, data in ((f"sub/{n}.png", picture(n)), (f"sub/{n}.txt", str(n)))
}


def test_files_beside_a_folder_s_pictures_are_references_by_their_numbers(tmp_path: Path) -> None:
    more = {"sub/0.ref2.png": picture(12), "sub/0.REF1.png": picture(11)}
    more |= {"sub/2.ref10.png": picture(30), "sub/2.ref9.png": picture(29)}
    folder = write_files(tmp_path / "pictures", {**TARGETS, **more})
    source = {"kind": "folder", "path": str(folder), "references": "files"}
    assert named(sourced(source, tmp_path)) == {
        "0": [picture(11), picture(12)],
        "1": [],
        "2": [picture(29), picture(30)],
    }


def test_folders_beside_a_folder_have_references_by_the_names_of_pictures(tmp_path: Path) -> None:
    """As ai-toolkit's control_path lists folders, and musubi-tuner numbers several of a picture."""
    folder = write_files(tmp_path / "pictures", TARGETS)
    first = write_files(tmp_path / "a", {"sub/0.jpg": picture(10), "sub/2_1.png": picture(21)})
    write_files(first, {"sub/2_0.png": picture(20)})
    second = write_files(tmp_path / "b", {"sub/0.webp": picture(11)})
    source = {"kind": "folder", "path": str(folder), "references": "files"}
    folders = {"reference_folders": [str(first), str(second)]}
    assert named(sourced({**source, **folders}, tmp_path)) == {
        "0": [picture(10), picture(11)],
        "1": [],
        "2": [picture(20), picture(21)],
    }


def test_a_folder_of_references_may_be_within_the_folder_of_pictures(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "pictures", {"0.png": picture(0), "0.txt": "0"})
    write_files(folder, {"control/0.png": picture(10)})
    source = {"kind": "folder", "path": str(folder), "references": "files"}
    source |= {"reference_folders": [str(folder / "control")]}
    assert named(sourced(source, tmp_path)) == {"0": [picture(10)]}


def no_column(tmp_path: Path) -> dict[str, Any]:
    path = write_list(tmp_path / "list.parquet", [{"url": "a", "caption": "", "source_1": "x"}])
    return {"kind": "urls", "path": str(path), "reference_columns": ["source1"]}


def nested_column(tmp_path: Path) -> dict[str, Any]:
    table = pa.table({"url": ["a"], "caption": [""], "one": [[{"x": 1}]]})
    pq.write_table(table, tmp_path / "list.parquet")
    return {"kind": "urls", "path": str(tmp_path / "list.parquet"), "reference_columns": ["one"]}


def no_files(tmp_path: Path) -> dict[str, Any]:
    folder = write_files(tmp_path / "pictures", TARGETS)
    return {"kind": "folder", "path": str(folder), "references": "files"}


def no_member(tmp_path: Path) -> dict[str, Any]:
    path = packed(tmp_path / "a.tar", [("0.png", picture(0)), ("0.ref1.png", picture(1))])
    return {"kind": "tars", "path": str(path), "reference_extensions": ["ref2.png"]}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (no_column, r"reference_columns.0: .* no column 'source1' \(did you mean 'source_1'\?\)"),
        (nested_column, "column 'one' holds .*struct.*, not text"),
        (no_files, "has no file with NAME.ref1.png"),
        (no_member, r"reference_extensions.0: .*'ref2.png' \(did you mean 'ref1.png'\?\)"),
    ],
)
def test_references_that_are_not_there_are_refused(
    tmp_path: Path, source: Callable[[Path], dict[str, Any]], words: str
) -> None:
    with pytest.raises(Refused, match=words):
        download.check(sourced(source(tmp_path), tmp_path))


@pytest.mark.slow
def test_references_of_urls_are_fetched_once_and_without_any_all_train_as_text_to_image(
    tiny_sd: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"url": f"good/{n}", "before": json.dumps([])} for n in range(12)]
    rows = [{**row, "caption": "", "before": f"good/{100 + n % 2}"} for n, row in enumerate(rows)]
    with Web() as web:
        path = write_list(tmp_path / "list.parquet", rows)
        source = {"kind": "urls", "path": str(path), "base_url": f"http://{web.host}"}
        source |= {"reference_columns": ["before"]}
        recipe = recipe_of(tmp_path / "store", tiny_sd, source)
        latents = encoded(recipe)
        assert web.requests["/good/100"] == web.requests["/good/101"] == 1
        assert latents.summary["references"] == 2 and latents.summary["samples"] == 12
        fetched = web.requests.total()

        write_list(Path(path), [{**row, "before": ""} for row in rows])
        latents = encoded(recipe)
        assert web.requests.total() == fetched and latents.summary["references"] == 0
    assert "no picture has a reference: all train as without" in caplog.text
    assert Store(recipe.store).fs.exists(latents.path)
