"""Sources: every kind and format yields its rows, or any span of them, or a one-line error."""

import socket
from http.server import SimpleHTTPRequestHandler
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
from loopback_server import LoopbackServer
from source_rows import ROWS, make_recipe, many_rows, parquet, png, rows_of, write_list
from store_servers import REMOTE, UrlOf

from artifacts.records import digest_json
from configs.errors import Away, Refused
from configs.settings.data import DigitsSource, UrlSource
from tasks import download
from tasks.download import lists as download_lists
from tasks.download.rows import Row
from tasks.download.source_files import reading
from tasks.download.sources import Digits

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


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
    file = write_list(tmp_path / name, many_rows(50_000))
    listed = {"kind": "urls", "path": file, "format": name.split(".")[1]}
    tables = []
    for threads in (1, 2, 5):
        with duckdb.connect(config={"threads": threads}) as db, monkeypatch.context() as patch:
            patch.setattr(download_lists, "_database", lambda db=db: db)
            read = download_lists.read_list(file, UrlSource.model_validate(listed))
            tables.append(pa.concat_tables(read))
    assert [row["url"] for row in many_rows(50_000)] == tables[0]["url"].to_pylist()
    assert tables[0].equals(tables[1]) and tables[0].equals(tables[2])


def test_a_damaged_footer_of_a_parquet_file_affects_no_other_list(tmp_path: Path) -> None:
    """Some damage breaks assertions of DuckDB, and some hides nulls from its optimizer."""
    path, good = tmp_path / "a.parquet", tmp_path / "b.jsonl"
    rows = pa.table({"url": ["http://a/1.jpg", None, "http://a/3.jpg"]})
    pq.write_table(rows, path, compression="none", store_schema=False)
    write_list(good, [{"url": "http://a/1.jpg"}])
    listed = UrlSource(kind="urls", path=str(path), caption_column=None)
    others = listed.model_copy(update={"path": str(good), "format": "jsonl"})
    whole = path.read_bytes()
    errors = set()
    for place in range(len(whole) - 8 - int.from_bytes(whole[-8:-4], "little"), len(whole) - 8):
        for byte in (whole[place] ^ 1, 0):
            path.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
            try:
                tables = list(download_lists.read_list(str(path), listed))
            except Refused as error:
                errors |= {word for word in ("INTERNAL", "statistics") if word in str(error)}
            else:
                assert not any(
                    table[name].null_count for table in tables for name in ("url", "hash")
                )
    assert errors == {"INTERNAL", "statistics"}
    assert [*download_lists.read_list(str(good), others)]


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
        {"url": "d", "caption": [None, "one", None]},
        {"url": "e", "caption": [None]},
    ]
    recipe = make_recipe(
        {"kind": "urls", "path": write_list(tmp_path / "a.jsonl", rows), "format": "jsonl"}
    )
    read = rows_of(recipe, tmp_path)
    whole = [("one", "two"), ("",), ("? half",), ("one",), ("",)]
    assert [row.captions for row in read] == whole  # of Python, because of the surrogate
    lists = [{**row, "image": png(1)} for row in rows if row["url"] != "c"]
    path = write_list(tmp_path / "a.parquet", lists)
    for source in ({"kind": "urls"}, {"kind": "dataset", "caption_column": "caption"}):
        found = rows_of(make_recipe({**source, "path": path}), tmp_path)
        assert [row.captions for row in found] == [*whole[:2], *whole[3:]]


def test_objects_and_lists_in_lists_are_no_captions(tmp_path: Path) -> None:
    captions = [{"text": "a"}, ["one", {"text": "a"}, ["b"], 3], [{"text": "a"}], "a cat"]
    rows = [{"url": f"http://a/{n}", "caption": c} for n, c in enumerate(captions)]
    lines = {"kind": "urls", "path": write_list(tmp_path / "a.jsonl", rows), "format": "jsonl"}
    whole = rows_of(make_recipe(lines), tmp_path)
    assert [row.captions for row in whole] == [("",), ("one", "3"), ("",), ("a cat",)]
    (tmp_path / "a.jsonl").open("a").write("malformed\n")  # read by Python
    assert rows_of(make_recipe(lines), tmp_path)[:4] == whole
    (tmp_path / "pictures").mkdir()
    for n in range(4):
        (tmp_path / f"pictures/{n}.png").write_bytes(png(n))
    named = [{"file_name": f"{n}.png", "caption": c} for n, c in enumerate(captions)]
    write_list(tmp_path / "pictures/metadata.jsonl", named)
    folder = {"kind": "folder", "path": str(tmp_path / "pictures"), "caption_column": "caption"}
    pictures = rows_of(make_recipe(folder), tmp_path)
    assert [row.captions for row in pictures] == [row.captions for row in whole]


def test_bytes_that_are_no_utf8_lose_their_letters_alike(tmp_path: Path) -> None:
    latin = 'un caf\xe9 d\'\xe9t\xe9 \\ "x"\n'.encode("latin-1")
    columns = {"url": [b"http://a/1"], "caption": [latin], "image": [png(1)]}
    pq.write_table(pa.table(columns), path := tmp_path / "a.parquet")
    (listed,) = rows_of(make_recipe({"kind": "urls", "path": str(path)}), tmp_path)
    assert listed.captions == (latin.decode(errors="replace"),)
    dataset = {"kind": "dataset", "path": str(path), "caption_column": "caption"}
    (embedded,) = rows_of(make_recipe(dataset), tmp_path)
    assert embedded.captions == listed.captions


def test_a_web_server_without_range_requests_is_named(tmp_path: Path) -> None:
    """A parquet file is read from its end; Python's own server gives whole files alone."""
    write_list(tmp_path / "a.parquet", many_rows(20_000))

    class Whole(SimpleHTTPRequestHandler):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given, directory=str(tmp_path))

    with LoopbackServer(Whole) as server:
        source = {"kind": "urls", "path": f"{server.url}/a.parquet"}
        with pytest.raises(Refused, match=r"its web server gives no parts of a file"):
            download.plan(make_recipe(source))


def test_a_caption_that_is_not_a_number_is_none(tmp_path: Path) -> None:
    """As pandas has a missing text; the text NaN is a caption."""
    captions = [float("nan"), "NaN", "a cat"]
    rows = [{"url": f"http://a/{n}", "caption": c} for n, c in enumerate(captions)]
    lines = {"kind": "urls", "path": write_list(tmp_path / "a.jsonl", rows), "format": "jsonl"}
    whole = rows_of(make_recipe(lines), tmp_path)
    assert [row.captions for row in whole] == [("",), ("NaN",), ("a cat",)]
    (tmp_path / "a.jsonl").open("a").write("malformed\n")  # read by Python
    assert rows_of(make_recipe(lines), tmp_path)[:3] == whole
    number = {"url": "http://a/0", "caption": captions[0], "image": png(0)}
    path = write_list(tmp_path / "a.parquet", [number])
    (listed,) = rows_of(make_recipe({"kind": "urls", "path": path}), tmp_path)
    dataset = {"kind": "dataset", "path": path, "caption_column": "caption"}
    (embedded,) = rows_of(make_recipe(dataset), tmp_path)
    assert listed.captions == embedded.captions == ("",)


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_the_name_of_a_folder_is_no_column(tmp_path: Path, kind: str) -> None:
    """As of Hive's partitions, whose values would replace those of the files."""
    folder = tmp_path / "caption=wrong"
    folder.mkdir()
    path = write_list(folder / f"a.{kind}", [{"url": "http://a/1", "caption": "right"}])
    (row,) = rows_of(make_recipe({"kind": "urls", "path": path, "format": kind}), tmp_path)
    assert row.captions == ("right",)


def test_base_url_is_ignored_for_absolute_urls_and_sha256_is_not(tmp_path: Path) -> None:
    def digest(rows: list[dict[str, Any]], **settings: Any) -> str:
        path = write_list(tmp_path / "a.parquet", rows)
        return download.plan(make_recipe({"kind": "urls", "path": path, **settings})).source_digest

    rows = [{**row, "hash": "0" * 64} for row in ROWS]
    assert digest(rows) == digest(rows, base_url="http://elsewhere.org")
    changed = [{**rows[0], "hash": "1" * 64}, *rows[1:]]
    assert digest(rows) == digest(changed)
    assert digest(rows, sha256_column="hash") != digest(changed, sha256_column="hash")


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
        fs.pipe_file(f"{root}/pictures_unique/{name}", data)  # a folder is a whole name
    rows = rows_of(make_recipe({"kind": "folder", "path": f"{url}/pictures"}), tmp_path)
    assert [row.captions for row in rows] == [("a cat",), ("",)]
    assert [Path(row.file or "").read_bytes() for row in rows] == [png(1), png(2)]
    with pytest.raises(Refused, match=r"gone: no such file|gone: no such folder"):
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
    pq.write_table(
        pa.table({"url": ["u"], "Caption": ["c"], "caption": ["d"]}), tmp_path / "case.parquet"
    )
    nested = str(tmp_path / "nested.parquet")
    pq.write_table(pa.table({"url": ["u"], "urls": [["u"]], "raw": [[{"raw": "c"}]]}), nested)
    (tmp_path / "lines.json").write_text(' {"url": "a", "caption": ""}\n' * 2)
    (tmp_path / "array.jsonl").write_text('\ufeff [{"url": "a", "caption": ""}]')
    (tmp_path / "wide.tsv").write_text("url\tcaption\nu\tc\n", encoding="utf-16")
    (tmp_path / "twice.csv").write_text("url,caption,caption\nu,c,d\n")
    urls = {"kind": "urls", "path": good}
    return {
        "captions of structures": (
            {**urls, "path": nested, "caption_column": "raw"},
            r"source\.caption_column: .*column 'raw' holds list<.*struct<.*, not text",
        ),
        "captions of structures of a dataset": (
            {"kind": "dataset", "path": nested, "image_column": "url", "caption_column": "raw"},
            r"source\.caption_column: .*column 'raw' holds list<.*struct<.*, not text",
        ),
        "lists of urls": (
            {**urls, "path": nested, "url_column": "urls", "caption_column": None},
            r"source\.url_column: .*column 'urls' holds list<.*, not text",
        ),
        "lines of json": (
            {**urls, "path": str(tmp_path / "lines.json"), "format": "json"},
            "looks like jsonl, not json: change source.format",
        ),
        "an array of json": (
            {**urls, "path": str(tmp_path / "array.jsonl"), "format": "jsonl"},
            "looks like json, not jsonl: change source.format",
        ),
        "a spreadsheet's text": (
            {**urls, "path": str(tmp_path / "wide.tsv"), "format": "tsv"},
            r"wide\.tsv: it is UTF-16: save it as UTF-8",
        ),
        "a column twice": (
            {**urls, "path": str(tmp_path / "twice.csv"), "format": "csv"},
            r"source\.caption_column: .*twice\.csv has several columns 'caption'",
        ),
        "column of a later file": (
            {**urls, "path": str(tmp_path / "two")},
            r"source\.caption_column: .*b\.parquet has no column 'caption' \(did you mean 'Caption",
        ),
        "columns that differ in case": (
            {**urls, "path": str(tmp_path / "case.parquet")},
            r"case\.parquet has another column 'caption' in other case: rename one of them",
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
        "no folder": ({"kind": "folder", "path": good}, "no such folder"),
        "no files": ({"kind": "folder", "path": str(tmp_path / "empty")}, "or no visible files"),
        "no pictures": ({"kind": "folder", "path": str(tmp_path)}, r"has no pictures \(.jpg, "),
        "image column": (
            {"kind": "dataset", "path": good},
            r"source\.image_column: .* no column 'image' \(there are: url, caption\)",
        ),
        "no bytes": (
            {"kind": "dataset", "path": good, "image_column": "url", "caption_column": "caption"},
            "url holds .*, not encoded pictures",
        ),
    }  # fmt: skip


def test_an_unusable_source_is_a_one_line_error(tmp_path: Path) -> None:
    for name, (source, words) in _unusable_sources(tmp_path).items():
        with pytest.raises(Refused, match=words) as error:
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
    with pytest.raises(Away) as raised, reading(url):
        raise error
    where = "https://example.org/list.parquet?signature=..."
    assert str(raised.value).startswith(f"source: {where}: cannot be read now (cut off")
    assert "secret" not in str(raised.value) and "\n" not in str(raised.value)


def test_a_bug_is_not_reported_as_an_unreachable_source() -> None:
    with pytest.raises(KeyError), reading("s3://bucket"):
        raise KeyError("bug")


def test_a_port_in_use_is_reported_before_any_work() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Refused, match=f"port {port} is in use"):
            download.check(make_recipe({"kind": "digits", "port": port}))
    download.check(make_recipe({"kind": "digits", "port": port}))


def test_the_demo_s_digits_are_in_chalk_on_a_board_of_either_colour(tmp_path: Path) -> None:
    rows = {}
    for board in ("green", "black"):
        source = {"kind": "digits", "count": 3, "rehearsal": 0, "board": board}
        rows[board] = rows_of(make_recipe(source), tmp_path)
        assert all(f"white chalk on a {board} board" in row.captions[0] for row in rows[board])
    assert {row.url for row in rows["green"]} == {row.url for row in rows["black"]}
    (piece,) = Digits(DigitsSource(kind="digits")).pieces()  # as before there was `board`
    known = {"kind": "digits", "seed": 0, "count": 1797, "rehearsal": 900}
    assert piece.identity == digest_json(known)


def test_encode_quality_of_png_has_its_own_range(tmp_path: Path) -> None:
    source = {"kind": "urls", "path": write_list(tmp_path / "a.parquet", ROWS)}
    with pytest.raises(Refused, match="for png it is the compression"):
        download.check(make_recipe(source, encode_format="png"))
