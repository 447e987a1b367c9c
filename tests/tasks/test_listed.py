"""The list side of a data set, as SQL has it for a selection and for people."""

import json
from pathlib import Path

import duckdb
import pytest
from shortest_recipe import shortest_recipe
from source_rows import png

from artifacts.store import Artifact, Store
from tasks import download
from tasks.data_set import DataSet
from tasks.download.listed import HOST, listed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


def images_of(folder: Path, store: Path, lines: list[dict[str, object]]) -> Artifact:
    """The images of a folder with a table, really downloaded; a line without a picture fails."""
    folder.mkdir()
    for number, line in enumerate(lines):
        if line.get("file_name") is not None:
            (folder / str(line["file_name"])).write_bytes(png(number))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metadata.jsonl").write_text(text)
    further = sorted({name for line in lines for name in line} - {"file_name", "text"})
    source = {"kind": "folder", "path": str(folder), "additional_columns": further}
    settings = {"shard_size": 4, "min_image_size": 1, "image_size": 8}
    recipe = shortest_recipe(source=source, store=str(store), download=settings)
    stage = download.DownloadStage(recipe, download.plan(recipe))
    draft = Store(recipe.store).draft(stage.parts)
    return draft.commit(stage.build(draft, lambda *_: None), {})


def test_a_list_has_its_columns_with_the_types_of_all_values(tmp_path: Path) -> None:
    """One text among numbers of another shard makes a column text."""
    lines: list[dict[str, object]] = [
        {
            "file_name": f"{n}.png",
            "text": f"picture {n}",
            "score": n / 2,
            "likes": n,
            "flag": n % 2 == 0,
            "it's odd": None if n else "x",
            "mixed": "seven" if n == 7 else n,
        }
        for n in range(12)
    ]
    lines.append({**lines[0], "file_name": None, "text": "no picture"})
    with duckdb.connect() as db:
        rows = listed(images_of(tmp_path / "in", tmp_path / "store", lines), db)
        types = dict(zip(rows.columns, map(str, rows.types), strict=True))
        assert {n: types[n] for n in ("score", "likes", "flag", "it's odd", "mixed")} == {
            "score": "DOUBLE",
            "likes": "BIGINT",
            "flag": "BOOLEAN",
            "it's odd": "VARCHAR",
            "mixed": "VARCHAR",
        }
        shown = "caption, score, mixed, host, width, caption_length"
        found = rows.select(shown).order("score").fetchall()
    mixed = [str(line["mixed"]) for line in lines[:12]]
    assert found == [
        (f"picture {n}", n / 2, mixed[n], "", 8, len(f"picture {n}")) for n in range(12)
    ]


def test_a_column_of_the_list_is_not_taken_for_one_of_a_selection(tmp_path: Path) -> None:
    lines: list[dict[str, object]] = [
        {"file_name": f"{n}.png", "text": "t", "Kept": "no", "group": n} for n in range(3)
    ]
    data = DataSet.before(images_of(tmp_path / "in", tmp_path / "store", lines))
    with data.opened() as db:
        found = db.execute('select kept, reason, "group" from entries').fetchall()
    assert found == [(True, "", None)] * 3


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://Cdn.Example.org:8443/a@b.jpg?host=c", "cdn.example.org"),
        ("http://user:word@a.example/1.jpg", "a.example"),
        ("s3://bucket/pictures/1.jpg", "bucket"),
        ("pictures.tar#1.jpg", ""),
    ],
)
def test_a_host_is_that_of_its_url_without_user_and_port(url: str, host: str) -> None:
    assert duckdb.execute(f"select {HOST} from (select ? as url)", [url]).fetchall() == [(host,)]
