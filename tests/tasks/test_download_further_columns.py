"""Further columns of lists: kept, hashed, and written without secrets."""

import json
import math
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from kiln_command import python
from source_rows import ROWS, make_recipe, rows_of, write_list

from configs.errors import Refused
from configs.settings.data import UrlSource
from tasks import download
from tasks.download import lists

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


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
    by_python = lists.read_malformed_list(path, UrlSource.model_validate(source))
    texts = [text for table in by_python for text in table["additional"].to_pylist()]
    assert [json.loads(text) for text in texts] == found


def test_a_time_has_one_text_in_every_time_zone(tmp_path: Path) -> None:
    """Machines otherwise give a row several keys, and download it again."""
    moment = datetime(2026, 11, 28, tzinfo=UTC)
    path = write_list(tmp_path / "a.parquet", [{"url": "u", "caption": moment, "seen": moment}])
    code = f"""if True:
        from configs.settings.data import UrlSource
        from tasks.download.lists import read_list
        source = UrlSource(kind="urls", path={path!r}, additional_columns=["seen"])
        (table,) = read_list({path!r}, source)
        print(table["captions"][0], table["additional"][0])
    """
    done = python("-c", code, env={**os.environ, "TZ": "America/New_York"})
    assert done.stdout == """['2026-11-28 00:00:00+00'] {"seen":"2026-11-28 00:00:00+00"}\n"""


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
    source = {"kind": "urls", "path": path, "format": name, "additional_columns": MORE}
    by_both = []
    for read in (lists.read_list, lists.read_malformed_list):
        tables = list(read(path, UrlSource.model_validate(source)))
        by_both.append([h for table in tables for h in table["hash"].to_pylist()])
    assert by_both[0] == by_both[1] and len(set(by_both[0])) == len(WIDE) + 2


def test_secrets_of_urls_in_further_columns_are_neither_stored_nor_hashed() -> None:
    def hashed(signature: str) -> tuple[str, bytes]:
        url = f"https://u:pw@h/a.jpg?id=7&X-Amz-Signature={signature}"
        more = json.dumps({"thumb": url, "more": [{"x": url}]})
        row = {"url": "u", "captions": [], "additional": more}
        (table,) = lists.hash_rows([row])
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
    with pytest.raises(Refused, match=r"additional_columns\.1: .* has no column 'lieks'"):
        download.check(make_recipe(source))
