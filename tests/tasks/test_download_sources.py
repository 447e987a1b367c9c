"""Sources: every kind and format yields its rows, or any span of them, or a one-line error."""

import gzip
import json
import math
import os
import random
import socket
import tracemalloc
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import duckdb
import fsspec
import gcsfs.retry
import google.auth.exceptions
import httpx2
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile
from hub_server import HubServer, Repository
from huggingface_hub import HfFileSystem
from source_rows import ROWS, context, make_recipe, png, rows_of, write_list
from store_servers import REMOTE, UrlOf

from artifacts.cache_errors import CacheUnusable
from tasks import download
from tasks.download import (
    parquet_dataset,
    plan_parquet,
    plan_shards,
    read_lists_by_duckdb,
    read_malformed_lists,
    sources,
)
from tasks.download.download_shard import download_shard
from tasks.download.list_files import reading
from tasks.download.read_lists_by_duckdb import FORMATS, read_list
from tasks.download.read_lists_by_duckdb import read_malformed_list as read_list_in_python
from tasks.download.row_fields_and_hash import Row
from tasks.download.source_protocol import PictureLocation
from tasks.download.stage_errors import SourceError

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILN_CACHE", str(tmp_path / "cache"))


FORMAT_NAMES = [
    *("parquet", "csv", "tsv", "jsonl", "json"),
    *("csv.gz", "tsv.gz", "jsonl.gz", "json.gz"),
]


def test_lists_of_every_format_have_the_same_rows_and_keys(tmp_path: Path) -> None:
    keys = set()
    for name in FORMAT_NAMES:
        (tmp_path / name).mkdir()
        write_list(tmp_path / name / f"a::1.{name}", ROWS[:4])  # no chain of filesystems
        write_list(tmp_path / name / f"a::2.{name}", ROWS[4:])
        for path in (tmp_path / name, tmp_path / name / f"*.{name}"):
            kind = name.partition(".")[0]
            recipe = make_recipe({"kind": "urls", "path": str(path), "format": kind})
            assert rows_of(recipe, tmp_path) == [Row(r["url"], (r["caption"],)) for r in ROWS]
            plan = download.plan(recipe)
            keys.add((plan.source_digest, *(shard.key for shard in plan.shards)))
    assert len(keys) == 1


WIDE = [
    {**row, "likes": n, "score a": n / 3, "it's": f"ä{n}\n", "tags": ["x", f"{n}"], "none": None}
    for n, row in enumerate(ROWS)
]
MORE = ("it's", "likes", "score a", "tags", "none")


@pytest.mark.parametrize("name", ["parquet", "jsonl.gz", "json"])
def test_any_number_of_further_columns_is_kept(tmp_path: Path, name: str) -> None:
    path = write_list(tmp_path / f"a.{name}", WIDE)
    source = {"kind": "urls", "path": path, "format": name.split(".")[0]}
    found = rows_of(make_recipe({**source, "additional_columns": MORE}), tmp_path)
    assert [r.additional for r in found] == [{key: row[key] for key in MORE} for row in WIDE]
    assert [row.additional for row in rows_of(make_recipe(source), tmp_path)] == [{}] * len(ROWS)


@pytest.mark.parametrize("name", ["csv", "tsv.gz"])
def test_further_columns_of_text_lists_are_text(tmp_path: Path, name: str) -> None:
    """Also those of a list with a malformed line, which Python reads."""
    path = write_list(tmp_path / f"a.{name}", WIDE)
    kind = name.split(".")[0]
    source = {"kind": "urls", "path": path, "format": kind, "additional_columns": MORE[:2]}
    found = [row.additional for row in rows_of(make_recipe(source), tmp_path)]
    assert found == [{"it's": row["it's"], "likes": str(row["likes"])} for row in WIDE]
    columns = {"url": "url", "captions": "caption", "sha256": None, "aesthetic_score": None}
    by_python = read_lists_by_duckdb.read_malformed_list(
        path, FORMATS[kind], columns, None, MORE[:2]
    )
    texts = [text for table in by_python for text in table["additional"].to_pylist()]
    assert [json.loads(text) for text in texts] == found


@pytest.mark.parametrize("name", ["csv", "jsonl"])
def test_both_readers_of_a_list_with_further_columns_give_equal_hashes(
    tmp_path: Path, name: str
) -> None:
    """One malformed line, after which Python reads the file, thus changes no other row."""
    odd = {
        **WIDE[0],
        "likes": int("9" * 4000),
        "score a": "\x7f ü",
        "tags": [1.0, {"b": 1, "a": 2}],
    }
    path = write_list(tmp_path / f"a.{name}", [*WIDE, odd, {**odd, "likes": 1e300}])
    columns = {"url": "url", "captions": "caption", "sha256": None, "aesthetic_score": None}
    by_both = []
    for read in (read_list, read_list_in_python):
        tables = list(read(path, FORMATS[name], columns, None, MORE))
        by_both.append([h for table in tables for h in table["hash"].to_pylist()])
    assert by_both[0] == by_both[1] and len(set(by_both[0])) == len(WIDE) + 2


def test_secrets_of_urls_in_further_columns_are_neither_stored_nor_hashed() -> None:
    def hashed(signature: str) -> tuple[str, bytes]:
        url = f"https://u:pw@h/a.jpg?id=7&X-Amz-Signature={signature}"
        more = json.dumps({"thumb": url, "more": [{"x": url}]})
        row = {"url": "u", "captions": [], "additional": more}
        (table,) = read_lists_by_duckdb.hash_rows([row])
        return table["additional"][0].as_py(), table["hash"][0].as_py()

    first, again = hashed("first"), hashed("again")
    assert first == again and "https://h/a.jpg?id=7&X-Amz-Signature=..." in first[0]
    assert "pw" not in first[0] and "first" not in first[0]


def test_an_integer_of_thousands_of_digits_costs_no_other_column(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"url": "u", "n": %s, "m": 2}\n' % ("9" * 5000))
    source = {"kind": "urls", "path": str(tmp_path / "a.jsonl"), "format": "jsonl"}
    recipe = make_recipe({**source, "caption_column": None, "additional_columns": ("n", "m")})
    assert [row.additional for row in rows_of(recipe, tmp_path)] == [{"n": None, "m": 2}]


def test_a_further_column_is_part_of_its_row(tmp_path: Path) -> None:
    def keys(rows: list[dict[str, Any]], more: tuple[str, ...]) -> list[str]:
        path = write_list(tmp_path / "a.parquet", rows)
        source = {"kind": "urls", "path": path, "additional_columns": more}
        return [shard.key for shard in download.plan(make_recipe(source)).shards]

    changed = [{**WIDE[0], "likes": 99}, *WIDE[1:]]
    assert keys(WIDE, ()) == keys(changed, ())
    assert keys(WIDE, ("likes",)) != keys(changed, ("likes",))
    assert keys(WIDE, ("likes",)) != keys(WIDE, ())


def test_further_values_that_are_no_json_are_null(tmp_path: Path) -> None:
    odd = [{**ROWS[0], "x": value, "y": 1} for value in (math.nan, math.inf, 0.5)]
    path = write_list(tmp_path / "a.parquet", odd)
    source = {"kind": "urls", "path": path, "additional_columns": ("x",)}
    found = [row.additional["x"] for row in rows_of(make_recipe(source), tmp_path)]
    assert found == [None, None, 0.5]
    (tmp_path / "b.jsonl").write_text('{"url": "u", "caption": "", "x": 1e999}\n')
    source = {**source, "path": str(tmp_path / "b.jsonl"), "format": "jsonl"}
    assert [row.additional for row in rows_of(make_recipe(source), tmp_path)] == [{"x": None}]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (("sha256",), "pictures have sha256 already"),
        (("a", "a"), "a column is named twice"),
        (("w", "W"), "a column is named twice"),
        (("",), "'' is no name of a column"),
        (('a"b',), "is no name of a column"),
    ],
)
def test_further_columns_need_names_of_their_own(columns: tuple[str, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_recipe({"kind": "urls", "path": "a.parquet", "additional_columns": columns})


def test_a_further_column_that_a_list_lacks_is_named(tmp_path: Path) -> None:
    path = write_list(tmp_path / "a.parquet", WIDE)
    source = {"kind": "urls", "path": path, "additional_columns": ("likes", "lieks")}
    with pytest.raises(SourceError, match=r"additional_columns\.1: .* has no column 'lieks'"):
        download.check(make_recipe(source))


def test_a_text_file_has_one_url_for_each_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("http://a/1.jpg?x=1,2\n\nhttp://a/2.jpg\r\n")
    source = {"kind": "urls", "path": str(tmp_path), "format": "txt", "caption_column": None}
    found = rows_of(make_recipe(source), tmp_path)
    assert found == [Row("http://a/1.jpg?x=1,2", ("",)), Row("http://a/2.jpg", ("",))]


@pytest.mark.parametrize(
    "name", ["a.csv", "a.jsonl.gz", pytest.param("a.parquet", marks=pytest.mark.extended)]
)
def test_rows_and_their_order_do_not_depend_on_threads(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_list(tmp_path / name, _many(50_000))
    columns = dict.fromkeys(["sha256", "aesthetic_score"]) | {"url": "url", "captions": "caption"}
    tables = []
    for threads in (1, 2, 5):
        with duckdb.connect(config={"threads": threads}) as db, monkeypatch.context() as patch:
            patch.setattr(read_lists_by_duckdb, "_database", lambda db=db: db)
            read = read_list(file, FORMATS[name.split(".")[1]], columns, None, ())
            tables.append(pa.concat_tables(read))
    assert [row["url"] for row in _many(50_000)] == tables[0]["url"].to_pylist()
    assert tables[0].equals(tables[1]) and tables[0].equals(tables[2])


def test_a_damaged_footer_of_a_parquet_file_affects_no_other_list(tmp_path: Path) -> None:
    """Some damage breaks assertions of DuckDB, and some hides nulls from its optimizer."""
    path, good = tmp_path / "a.parquet", tmp_path / "b.jsonl"
    rows = pa.table({"url": ["http://a/1.jpg", None, "http://a/3.jpg"]})
    pq.write_table(rows, path, compression="none", store_schema=False)
    write_list(good, [{"url": "http://a/1.jpg"}])
    columns = dict.fromkeys(["sha256", "aesthetic_score", "captions"]) | {"url": "url"}
    whole = path.read_bytes()
    errors = set()
    for place in range(len(whole) - 8 - int.from_bytes(whole[-8:-4], "little"), len(whole) - 8):
        for byte in (whole[place] ^ 1, 0):
            path.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
            try:
                tables = list(read_list(str(path), FORMATS["parquet"], columns, None, ()))
            except SourceError as error:
                errors |= {word for word in ("INTERNAL", "statistics") if word in str(error)}
            else:
                assert not any(
                    table[name].null_count for table in tables for name in ("url", "hash")
                )
    assert errors == {"INTERNAL", "statistics"}
    assert [*read_list(str(good), FORMATS["jsonl"], columns, None, ())]


def test_of_a_grown_source_only_what_is_new_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, read = _many(900), list[str]()
    for number in range(3):
        write_list(tmp_path / f"{number}.parquet", rows[300 * number :][:300])
    recipe = make_recipe({"kind": "urls", "path": str(tmp_path / "*.parquet")}, shard_size=40)
    monkeypatch.setattr(sources, "read_list", lambda f, *a: read.append(f) or read_list(f, *a))

    def plan() -> tuple[download.DownloadPlan, list[str]]:
        read.clear()
        planned = download.plan(recipe)
        return planned, [Path(file).name for file in read]

    first, files = plan()
    assert files == ["0.parquet", "1.parquet", "2.parquet"]
    assert plan() == (first, [])
    write_list(tmp_path / "3.parquet", _many(100, seed=1))
    grown, files = plan()
    assert files == ["3.parquet"]
    assert grown.shards[: len(first.shards) - 1] == first.shards[:-1]
    write_list(tmp_path / "1.parquet", [*rows[300:450], *rows[451:600]])
    edited, files = plan()
    assert files == ["1.parquet"], "the rows behind its last shard are as before"
    elsewhere = recipe.model_copy(update={"store": "memory://elsewhere"})
    afresh = download.plan(elsewhere)
    assert [s.key for s in afresh.shards] == [s.key for s in edited.shards]
    assert afresh.source_digest == edited.source_digest
    (tmp_path / "3.parquet").unlink()
    write_list(tmp_path / "1.parquet", rows[300:600])
    again, files = plan()
    assert (again.source_digest, files) == (first.source_digest, ["1.parquet"])


def test_rows_of_another_shard_are_not_committed(tmp_path: Path) -> None:
    path = write_list(tmp_path / "a.parquet", _many(40))
    recipe = make_recipe({"kind": "urls", "path": path}, tmp_path / "store")
    first, second, *_ = download.plan(recipe).shards
    with pytest.raises(download.SourceError, match=r"plan .* is damaged: run again"):
        download_shard(replace(first, spans=second.spans), context(recipe))
    assert not (tmp_path / "store/download").exists()


def test_a_piece_is_read_again_if_other_rows_come_before_it(tmp_path: Path) -> None:
    rows = [{**row, "sha256": f"{n:064x}"} for n, row in enumerate(_many(60))]
    source = {"kind": "urls", "path": str(tmp_path / "*.parquet"), "sha256_column": "sha256"}
    recipe = make_recipe(source, tmp_path / "store", shard_size=100)
    write_list(tmp_path / "1.parquet", rows[30:])
    for change in ({}, {"url": "http://signed.again/"}, {"sha256": "f" * 64}):
        changed = [{**row, **change} for row in rows[:30]]
        write_list(tmp_path / "0.parquet", changed)
        read = [(row.url, row.sha256) for row in rows_of(recipe, tmp_path)]
        assert read == [(row["url"], row["sha256"]) for row in [*changed, *rows[30:]]]


def test_urls_of_a_plan_are_read_with_the_key_alone(tmp_path: Path) -> None:
    rows = [{"url": f"http://h/{n}.jpg?sig=sesame{n}", "caption": "a cat"} for n in range(20)]
    listed = {"kind": "urls", "path": write_list(tmp_path / "a.parquet", rows)}
    recipe = make_recipe(listed, tmp_path / "store")
    assert [row.url for row in rows_of(recipe, tmp_path)] == [row["url"] for row in rows]
    stored = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    for path in stored:
        assert b"sesame" not in path.read_bytes()
        if path.suffix == ".parquet":
            assert "sesame" not in str(pq.read_table(path).to_pylist())
    (key,) = (tmp_path / "cache").rglob("plan.key")
    assert key.stat().st_mode & 0o777 == 0o600
    before = download.plan(recipe)
    key.unlink()
    assert download.plan(recipe).source_digest == before.source_digest
    assert [row.url for row in rows_of(recipe, tmp_path)] == [row["url"] for row in rows]


def test_a_picture_that_changes_after_it_was_planned_is_not_committed(tmp_path: Path) -> None:
    file = Path(write_list(tmp_path / "a.parquet", [{"image": png(1), "text": ""}] * 9))
    recipe = make_recipe({"kind": "dataset", "path": str(file)}, tmp_path / "store")
    shard = download.plan(recipe).shards[0]
    for changed in ([{"image": png(2), "text": ""}] * 9, [{"image": png(1), "text": ""}]):
        write_list(file, changed)
        with pytest.raises(download.SourceError, match="it changed while it was being read"):
            download_shard(shard, context(recipe))
    assert not (tmp_path / "store/download").exists()


def test_another_base_url_is_another_picture_unless_its_sha256_is_listed(tmp_path: Path) -> None:
    rows = [{"url": "1.jpg", "caption": "", "sha256": "ab" * 32}]
    listed = {"kind": "urls", "path": write_list(tmp_path / "a.parquet", rows)}

    def digest(**more: str) -> str:
        return download.plan(make_recipe({**listed, **more})).source_digest

    one, other = "http://one.example.org/", "http://other.example.org/"
    assert digest(base_url=one) == digest(base_url=one.rstrip("/")) != digest(base_url=other)
    assert digest(base_url=one) != digest()
    checked = {"sha256_column": "sha256"}
    assert digest(base_url=one, **checked) == digest(base_url=other, **checked)


def test_rows_may_have_several_captions_none_or_unpaired_surrogates(tmp_path: Path) -> None:
    rows = [
        {"url": "a", "caption": ["one", "two"]},
        {"url": "b", "caption": None},
        {"url": "c", "caption": "\ud83d half"},
    ]
    recipe = make_recipe(
        {"kind": "urls", "path": write_list(tmp_path / "a.jsonl", rows), "format": "jsonl"}
    )
    read = rows_of(recipe, tmp_path)
    assert [row.captions for row in read] == [("one", "two"), ("",), ("? half",)]


def test_base_url_is_ignored_for_absolute_urls_and_sha256_is_not(tmp_path: Path) -> None:
    def digest(rows: list[dict[str, Any]], **settings: Any) -> str:
        path = write_list(tmp_path / "a.parquet", rows)
        return download.plan(make_recipe({"kind": "urls", "path": path, **settings})).source_digest

    rows = [{**row, "hash": "0" * 64} for row in ROWS]
    assert digest(rows) == digest(rows, base_url="http://elsewhere.org")
    changed = [{**rows[0], "hash": "1" * 64}, *rows[1:]]
    assert digest(rows) == digest(changed)
    assert digest(rows, sha256_column="hash") != digest(changed, sha256_column="hash")


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


@pytest.mark.parametrize("folder", ["train_pictures", "train"])
def test_the_name_of_a_datasets_folder_selects_no_split(tmp_path: Path, folder: str) -> None:
    place = tmp_path / folder
    place.mkdir()
    for number, name in enumerate(("train-0.parquet", "test-0.parquet")):
        write_list(place / name, [{"image": png(number), "text": name}])
    recipe = make_recipe({"kind": "dataset", "path": str(place)})
    assert [row.captions for row in rows_of(recipe, tmp_path)] == [("train-0.parquet",)]


def test_a_folder_of_one_split_is_that_split(tmp_path: Path) -> None:
    place = tmp_path / "train"
    place.mkdir()
    write_list(place / "0.parquet", [{"image": png(0), "text": "a"}])
    assert rows_of(make_recipe({"kind": "dataset", "path": str(place)}), tmp_path)
    with pytest.raises(SourceError, match="has no files of split 'test'"):
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
    read = parquet_dataset._parquet_rows
    monkeypatch.setattr(parquet_dataset, "_parquet_rows", lambda *a: reads.append(a[0]) or read(*a))
    assert download.plan(recipe) == first
    assert reads == []
    for damaged in (tmp_path / "store/plan/shards").iterdir():  # is not used
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert download.plan(recipe).source_digest == first.source_digest
    assert reads == [str(file)]
    write_list(file, [{"image": png(n), "text": ""} for n in range(1, 7)])
    assert download.plan(recipe).source_digest != first.source_digest


def parquet(rows: list[dict[str, Any]]) -> bytes:
    buffer = BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


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

    def refused(**source: str) -> str:
        HfFileSystem.clear_instance_cache()
        with pytest.raises(download.SourceError) as error:
            download.plan(make_recipe({"kind": "dataset", "path": "some/pictures", **source}))
        line = str(error.value)
        assert line.startswith("source") and "\n" not in line
        return line

    assert "hf://datasets/no/pictures: no such file" in refused(path="no/pictures")
    assert "hf://datasets/some/pictures@gone: no such file" in refused(revision="gone")
    pictures.accepted_by = {"hf_mine"}
    assert "Cannot access gated repo" in refused()
    hub.fault = 500
    assert "500 Internal Server Error" in refused()
    assert "500 Internal Server Error" in refused(kind="folder", path="hf://datasets/a/pictures")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be reached: " in refused()


@pytest.mark.parametrize("kind", REMOTE)
def test_lists_and_pictures_are_read_from_a_bucket(
    kind: str, url_of: UrlOf, tmp_path: Path
) -> None:
    url = url_of(kind)
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{root}/lists/a::1.parquet", parquet(ROWS[:4]))  # no chain of filesystems
    fs.pipe_file(f"{root}/lists/a::2.parquet", parquet(ROWS[4:]))
    for path in (f"{url}/lists", f"{url}/lists/*.parquet"):
        rows = rows_of(make_recipe({"kind": "urls", "path": path}), tmp_path)
        assert rows == [Row(r["url"], (r["caption"],)) for r in ROWS]
    for name, data in {"a::1.png": png(1), "a::1.txt": b"a cat", "b.png": png(2)}.items():
        fs.pipe_file(f"{root}/pictures/{name}", data)
    rows = rows_of(make_recipe({"kind": "folder", "path": f"{url}/pictures"}), tmp_path)
    assert [row.captions for row in rows] == [("a cat",), ("",)]
    assert [Path(row.file or "").read_bytes() for row in rows] == [png(1), png(2)]
    with pytest.raises(download.SourceError, match=r"gone: no such file|gone: no such folder"):
        download.plan(make_recipe({"kind": "folder", "path": f"{url}/gone"}))


def _unusable_sources(tmp_path: Path) -> dict[str, tuple[dict[str, Any], str]]:
    good = write_list(tmp_path / "good.parquet", ROWS)
    (tmp_path / "bad.parquet").write_bytes(b"no parquet at all")
    (tmp_path / "bad.jsonl").write_text('not json\n{"url": "a", "caption": ""}\n')
    (tmp_path / "empty").mkdir()
    pq.write_table(pa.table({"url": pa.array([], "string"), "caption": pa.array([], "string")}),
                   tmp_path / "none.parquet")  # fmt: skip
    (tmp_path / "two").mkdir()
    write_list(tmp_path / "two/a.parquet", ROWS)
    pq.write_table(pa.table({"url": ["u"], "Caption": ["c"]}), tmp_path / "two/b.parquet")
    urls = {"kind": "urls", "path": good}
    return {
        "column of a later file": (
            {**urls, "path": str(tmp_path / "two")},
            r"source\.caption_column: .*b\.parquet has no column 'caption' \(did you mean 'Caption",
        ),
        "no such file": ({**urls, "path": f"{good}x"}, r"source\.path: .*parquetx: no such"),
        "empty folder": ({**urls, "path": str(tmp_path / "empty")}, "no .parquet files in"),
        "no rows": ({**urls, "path": str(tmp_path / "none.parquet")}, "source: it has no rows"),
        "not parquet": ({**urls, "path": str(tmp_path / "bad.parquet")}, "cannot be read"),
        "not json": (
            {**urls, "path": str(tmp_path / "bad.jsonl"), "format": "jsonl"},
            "its first line is not a JSON object",
        ),
        "column": (
            {**urls, "caption_column": "captoin"},
            r"source\.caption_column: .* no column 'captoin' \(did you mean 'caption'\?\)",
        ),
        "protocol": ({**urls, "path": "nowhere://a"}, "source: nowhere://a: cannot be read"),
        "no network": (
            {**urls, "path": "http://user:secret@127.0.0.1:9/list.parquet?signature=secret"},
            r"source: http://127\.0\.0\.1:9/list\.parquet\?signature=\.\.\.: |source\.path: ",
        ),
        "no folder": ({"kind": "folder", "path": good}, "no such folder"),
        "no pictures": ({"kind": "folder", "path": str(tmp_path / "empty")}, "or no .jpg"),
        "image column": (
            {"kind": "dataset", "path": good},
            r"source\.image_column: .* no column 'image' \(there are: url, caption\)",
        ),
        "no bytes": (
            {"kind": "dataset", "path": good, "image_column": "url", "caption_column": "caption"},
            "url holds .*, not encoded pictures",
        ),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("jsonl", "not json"),
        ("jsonl", "[1, 2]"),
        ("jsonl", '{"url": "http://example.org/9.jpg", "caption": "cut o'),
        ("csv", "http://example.org/9.jpg,a carriage return\rin the caption"),
        ("csv", f"http://example.org/9.jpg,{'x' * 200_000}"),
        ("csv", 'http://example.org/9.jpg,"an unclosed quote'),
        ("tsv", 'http://example.org/9.jpg\t"an unclosed quote'),
        ("csv", 'http://example.org/9.jpg,"a quoted" word'),
        ("csv", "http://example.org/9.jpg,a comma, in the caption"),
        ("csv", "http://example.org/9.jpg"),
    ],
    ids=[
        *("no JSON", "no object", "cut off", "carriage return", "huge field", "unclosed quote"),
        *("unclosed quote in tsv", "quoted word", "too many values", "too few values"),
    ],
)
def test_a_malformed_line_is_a_row_without_a_picture(tmp_path: Path, kind: str, line: str) -> None:
    good = Path(write_list(tmp_path / f"a.{kind}", ROWS)).read_text(encoding="utf-8")
    lines = good.splitlines(keepends=True)
    (tmp_path / f"a.{kind}").write_text("".join([*lines[:2], f"{line}\n", *lines[2:]]), newline="")
    source = {"kind": "urls", "path": str(tmp_path / f"a.{kind}"), "format": kind}
    found = rows_of(make_recipe(source), tmp_path)
    urls = [row["url"] for row in ROWS]
    position = 2 if kind == "jsonl" else 1
    assert [row.url for row in found] == [*urls[:position], "", *urls[position:]]


@pytest.mark.parametrize(
    "malformed", [{9}, {9, 1000}, {4990}], ids=["the limit", "a quote", "the end"]
)
def test_an_unclosed_quote_takes_no_other_line(tmp_path: Path, malformed: set[int]) -> None:
    """Its record ends at the limit of a record, at another such quote or at the end of the file."""
    urls = [f"http://x/{n}.jpg" for n in range(5000)]
    lines = [f"{url},a caption" for url in urls]
    for n in malformed:
        lines[n] = f'{urls[n]},"unclosed caption'
    (tmp_path / "a.csv").write_text("\n".join(["url,caption", *lines]) + "\n")
    source = {"kind": "urls", "path": str(tmp_path / "a.csv"), "format": "csv"}
    found = rows_of(make_recipe(source, shard_size=5000), tmp_path)
    empty, read = Row("", ("",)), [Row(url, ("a caption",)) for url in urls]
    assert found == [empty if n in malformed else row for n, row in enumerate(read)]


def test_rows_that_duckdb_accepts_are_rows_of_both_readers(tmp_path: Path) -> None:
    rows = ['u,"two\nlines"', 'u,"a ""quoted"" word"', 'u,24"', 'u,a "b" c', "u,c,", 'u,"c" ', ""]
    (tmp_path / "a.csv").write_text("\n".join(["url,caption", *rows]) + "\n")
    columns = {"url": "url", "captions": "caption", "sha256": None, "aesthetic_score": None}
    by_both = []
    for read in (read_list, read_list_in_python):
        tables = list(read(str(tmp_path / "a.csv"), FORMATS["csv"], columns, None, ()))
        by_both.append([h for table in tables for h in table["hash"].to_pylist()])
    assert by_both[0] == by_both[1] and len(by_both[0]) == len(rows) - 1


@pytest.mark.extended
def test_records_of_many_lines_with_stray_quotes_are_read_in_bounded_memory(tmp_path: Path) -> None:
    """Quotes that close one field and open the next one could make one record of all lines."""
    lines = [f'http://x/{n}.jpg","c\n' for n in range(100_000)]
    (tmp_path / "a.csv").write_text("".join(["url,caption\n", *lines]))
    found = FORMATS["csv"].tolerant
    assert found is not None
    tracemalloc.start()
    urls = [row["url"] for row in found(str(tmp_path / "a.csv"))]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert urls == [""] * len(lines) and peak < 2**23


def test_a_malformed_line_of_a_remote_list_is_a_row_without_a_picture(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in _many(30)]
    data = "\n".join([*lines, '{"url": "cut off']).encode()
    fsspec.filesystem("memory").pipe_file(f"/{tmp_path.name}/a::b.jsonl", data)
    source = {"kind": "urls", "path": f"memory://{tmp_path.name}", "format": "jsonl"}
    found = rows_of(make_recipe(source), tmp_path)
    assert [row.url for row in found] == [*(row["url"] for row in _many(30)), ""]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_malformed_lists_are_read_from_files_without_a_line_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The files of buckets and of web servers read whole lines only."""
    file = write_list(tmp_path / f"a.{kind}", ROWS)

    class RemoteFile(AbstractBufferedFile):
        def _fetch_range(self, start: int, end: int) -> bytes:
            return Path(self.path).read_bytes()[start:end]

    monkeypatch.setattr(LocalFileSystem, "_open", lambda fs, path, *_, **__: RemoteFile(fs, path))
    found = FORMATS[kind].tolerant
    assert found is not None
    assert [row["url"] for row in found(file)] == [row["url"] for row in ROWS]


def test_a_late_malformed_line_loses_no_row_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DuckDB and Python differ in what a blank line is, so one of them reads the whole file."""
    monkeypatch.setattr(read_lists_by_duckdb, "BATCH", 2048)
    urls = [f"http://example.org/{n}.jpg" for n in range(20_000)]
    lines = [*urls[:10], "\t", " \v ", *urls[10:]]
    (tmp_path / "a.txt").write_bytes("\n".join(lines).encode() + b"\nhttp://h/\xff.jpg\n")
    listed = {"kind": "urls", "path": str(tmp_path / "a.txt"), "format": "txt"}
    source = {**listed, "caption_column": None}
    shards = download.plan(make_recipe(source, shard_size=30_000)).shards
    tables = [plan_shards.read_spans(shard.spans, plan_parquet.plan_key()) for shard in shards]
    read = [url for table in tables for url in table["url"].to_pylist()]
    assert read == [*urls, "http://h/\ufffd.jpg"]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "txt"])
def test_a_line_that_unpacks_to_gigabytes_is_one_row_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(read_malformed_lists, "MAX_LINE", 2**20)
    rows = {"csv": "url,caption\nhttp://h/1,a\n", "jsonl": '{"url": "http://h/1"}\n'}
    before = rows.get(kind, "http://h/1\n")
    with gzip.open(tmp_path / f"a.{kind}.gz", "wb", compresslevel=1) as stream:
        stream.write(before.encode())
        for _ in range(40):
            stream.write(b"x" * 2**20)
        stream.write(b"\n" + before.splitlines()[-1].encode() + b"\n")
    found = FORMATS[kind].tolerant
    assert found is not None
    tracemalloc.start()
    urls = [row.get("url", "") for row in found(str(tmp_path / f"a.{kind}.gz"))]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert urls == ["http://h/1", "", "http://h/1"] and peak < 2**24


def test_a_damaged_plan_is_built_again_by_the_next_run(tmp_path: Path) -> None:
    path = write_list(tmp_path / "a.parquet", _many(40))
    recipe = make_recipe({"kind": "urls", "path": path}, tmp_path / "store")
    whole = rows_of(recipe, tmp_path)
    files = [*(tmp_path / "store/plan/shards").glob("*.0.parquet")]
    for file in files:
        data, at = bytearray(file.read_bytes()), file.stat()
        data[40] ^= 1
        file.write_bytes(data)
        os.utime(file, ns=(at.st_atime_ns, at.st_mtime_ns))
    with pytest.raises(download.SourceError):
        rows_of(recipe, tmp_path)
    assert rows_of(recipe, tmp_path) == whole


def test_a_damaged_index_of_a_plan_is_not_read(tmp_path: Path) -> None:
    """A changed digest of a shard's rows would download it once more, under another key."""
    write_list(tmp_path / "0.parquet", _many(40))
    recipe = make_recipe({"kind": "urls", "path": f"{tmp_path}/*.parquet"}, tmp_path / "store")
    before = download.plan(recipe)
    (file,) = (tmp_path / "store/plan/shards").glob("*.shards.parquet")
    data, at = file.read_bytes(), file.stat()
    index = pq.read_table(BytesIO(data))
    digests = [bytes(32), *index["digest"].to_pylist()[1:]]
    changed = index.set_column(0, index.schema.field(0), pa.array(digests, pa.binary(32)))
    pq.write_table(changed, file, compression="zstd")
    file.write_bytes(file.read_bytes().ljust(len(data), b"\0")[: len(data)])
    os.utime(file, ns=(at.st_atime_ns, at.st_mtime_ns))
    write_list(tmp_path / "1.parquet", _many(40, seed=1))
    with pytest.raises(ValueError, match=r"is damaged.*run again"):
        download.plan(recipe)
    keys = {shard.key for shard in download.plan(recipe).shards}
    assert keys >= {shard.key for shard in before.shards[:-1]}


def test_a_damaged_key_of_plans_is_named(tmp_path: Path) -> None:
    plan_parquet.plan_key()
    path = tmp_path / "cache/kilnworks/plan.key"
    for damaged in ("", "AAAA", "\xff" * 44):
        path.write_bytes(damaged.encode("latin-1"))
        with pytest.raises(download.SourceError, match=r"plan\.key is damaged: delete it"):
            plan_parquet.plan_key()
    path.unlink()
    assert plan_parquet.plan_key() == plan_parquet.plan_key()


def test_a_key_of_plans_that_cannot_be_written_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KILN_CACHE", str(tmp_path / "file"))
    with pytest.raises(CacheUnusable, match=r"Not a directory\): set KILN_CACHE"):
        plan_parquet.plan_key()


def test_an_unusable_source_is_a_one_line_error(tmp_path: Path) -> None:
    for name, (source, words) in _unusable_sources(tmp_path).items():
        with pytest.raises(download.SourceError, match=words) as error:
            download.plan(make_recipe(source))
        assert "\n" not in str(error.value), name
        assert "secret" not in str(error.value), name


@pytest.mark.parametrize(
    "error",
    [
        aiohttp.ClientPayloadError("cut off"),
        gcsfs.retry.HttpError({"message": "cut off", "code": 500}),
        google.auth.exceptions.RefreshError("cut off"),
        httpx2.ReadError("cut off"),
    ],
)
def test_an_unreachable_source_is_a_one_line_error(error: Exception) -> None:
    url = "https://example.org/list.parquet?signature=secret"
    error.args = (f"{error.args[0]} in {url}\n", *error.args[1:])
    with pytest.raises(download.SourceError) as raised, reading(url):
        raise error
    where = "https://example.org/list.parquet?signature=..."
    assert str(raised.value).startswith(f"source: {where}: cannot be reached: cut off")
    assert "secret" not in str(raised.value) and "\n" not in str(raised.value)


def test_a_bug_is_not_reported_as_an_unreachable_source() -> None:
    with pytest.raises(KeyError), reading("s3://bucket"):
        raise KeyError("bug")


def test_a_port_in_use_is_reported_before_any_work() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(download.SourceError, match=f"port {port} is in use"):
            download.check(make_recipe({"kind": "digits", "port": port}))
    download.check(make_recipe({"kind": "digits", "port": port}))


def test_encode_quality_of_png_has_its_own_range(tmp_path: Path) -> None:
    source = {"kind": "urls", "path": write_list(tmp_path / "a.parquet", ROWS)}
    with pytest.raises(download.SourceError, match="for png it is the compression"):
        download.check(make_recipe(source, encode_format="png"))


def _many(count: int, seed: int = 0) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [
        {"url": f"http://example.org/{draw.getrandbits(64)}", "caption": "c"} for _ in range(count)
    ]


def test_one_row_changed_added_or_removed_changes_only_its_own_shard(tmp_path: Path) -> None:
    def keys(rows: list[dict[str, Any]]) -> set[str]:
        path = write_list(tmp_path / "a.parquet", rows)
        shards = download.plan(make_recipe({"kind": "urls", "path": path}, shard_size=40)).shards
        return {shard.key for shard in shards}

    rows = _many(1000)
    before = keys(rows)
    assert len(before) > 10
    # A changed row may be, or become, a boundary; then the neighbouring shard changes too.
    for where in (0, 321, 999):
        for edited in (
            [*rows[:where], {**rows[where], "caption": "edited"}, *rows[where + 1 :]],
            [*rows[:where], {"url": "http://example.org/new", "caption": ""}, *rows[where:]],
            [*rows[:where], *rows[where + 1 :]],
        ):
            assert len(before - keys(edited)) <= 2
    one = [*rows[:500], {**rows[500], "caption": "edited"}, *rows[501:]]
    assert len(before - keys(one)) == len(keys(one) - before) == 1


def test_a_repeated_shard_is_planned_once(tmp_path: Path) -> None:
    path = write_list(tmp_path / "a.parquet", ROWS[:1] * 20)
    plan = download.plan(make_recipe({"kind": "urls", "path": path}))
    assert len({shard.key for shard in plan.shards}) == len(plan.shards)
    assert plan.rows == sum(shard.rows for shard in plan.shards) < 20


def test_settings_that_change_the_pictures_change_the_keys_and_others_do_not(
    tmp_path: Path,
) -> None:
    source = {"kind": "urls", "path": write_list(tmp_path / "a.parquet", ROWS)}

    def keys(**settings: Any) -> tuple[Any, list[str]]:
        recipe = make_recipe(source, **settings)
        return download.settings_for_key(recipe), [s.key for s in download.plan(recipe).shards]

    plain = keys()
    ways = {"max_connections": 3, "retries": 9, "timeout": 1.0, "contact": "me"}
    assert keys(**ways, max_failed=0.9, max_transient=0.5) == plain
    for settings in ({"image_size": 64}, {"encode_quality": 80}, {"opt_out_headers": ()}):
        changed = keys(**settings)
        assert changed[0] != plain[0]
        assert not set(changed[1]) & set(plain[1])


def test_planning_keeps_no_rows_in_memory(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        urls = [f"http://example.org/{'x' * 200}/{n}.jpg" for n in range(count)]
        table = pa.table({"url": urls, "caption": ["a caption " * 20] * count})
        pq.write_table(table, tmp_path / "many.parquet", row_group_size=5000)
        del urls, table
        recipe = make_recipe(
            {"kind": "urls", "path": str(tmp_path / "many.parquet")}, shard_size=500
        )
        tracemalloc.start()
        assert download.plan(recipe).rows == count
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    small, large = peak(5_000), peak(15_000)
    # The text of 10,000 more rows is 5 MB; only the list of shards may grow.
    assert large - small < 2_000_000
