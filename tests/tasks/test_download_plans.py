"""Plans of sources: which shards and keys rows get, and what a later plan reads again."""

import os
import tracemalloc
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from source_rows import ROWS, context, make_recipe, many_rows, rows_of, write_list

from configs.errors import Failed, Refused
from configs.load_recipe import load_recipe
from tasks import download
from tasks.download import shard_plan, sources
from tasks.download.lists import read_list
from tasks.download.shard import download_shard
from tasks.download.sources import SOURCES

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


def test_of_a_grown_source_only_what_is_new_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, read = many_rows(900), list[str]()
    for number in range(3):
        write_list(tmp_path / f"{number}.parquet", rows[300 * number :][:300])
    recipe = make_recipe({"kind": "urls", "path": str(tmp_path / "*.parquet")}, shard_size=40)
    monkeypatch.setattr(
        sources.lists, "read_list", lambda f, *a: read.append(f) or read_list(f, *a)
    )

    def plan() -> tuple[download.DownloadPlan, list[str]]:
        read.clear()
        planned = download.plan(recipe)
        return planned, [Path(file).name for file in read]

    first, files = plan()
    assert files == ["0.parquet", "1.parquet", "2.parquet"]
    assert plan() == (first, [])
    write_list(tmp_path / "3.parquet", many_rows(100, seed=1))
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
    path = write_list(tmp_path / "a.parquet", many_rows(40))
    recipe = make_recipe({"kind": "urls", "path": path}, tmp_path / "store")
    first, second, *_ = download.plan(recipe).shards
    with pytest.raises(Refused, match=r"plan .* is damaged: run again"):
        download_shard(replace(first, spans=second.spans), context(recipe))
    assert not (tmp_path / "store/download").exists()


def test_a_piece_is_read_again_if_other_rows_come_before_it(tmp_path: Path) -> None:
    rows = [{**row, "sha256": f"{n:064x}"} for n, row in enumerate(many_rows(60))]
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


def test_a_damaged_plan_is_built_again_by_the_next_run(tmp_path: Path) -> None:
    path = write_list(tmp_path / "a.parquet", many_rows(40))
    recipe = make_recipe({"kind": "urls", "path": path}, tmp_path / "store")
    whole = rows_of(recipe, tmp_path)
    files = [*(tmp_path / "store/plan/shards").glob("*.0.parquet")]
    for file in files:
        data, at = bytearray(file.read_bytes()), file.stat()
        data[40] ^= 1
        file.write_bytes(data)
        os.utime(file, ns=(at.st_atime_ns, at.st_mtime_ns))
    with pytest.raises(Refused):
        rows_of(recipe, tmp_path)
    assert rows_of(recipe, tmp_path) == whole


def test_a_damaged_index_of_a_plan_is_not_read(tmp_path: Path) -> None:
    """A changed digest of a shard's rows would download it once more, under another key."""
    write_list(tmp_path / "0.parquet", many_rows(40))
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
    write_list(tmp_path / "1.parquet", many_rows(40, seed=1))
    with pytest.raises(ValueError, match=r"is damaged.*run again"):
        download.plan(recipe)
    keys = {shard.key for shard in download.plan(recipe).shards}
    assert keys >= {shard.key for shard in before.shards[:-1]}


def test_a_damaged_key_of_plans_is_named(tmp_path: Path) -> None:
    shard_plan.plan_key()
    path = tmp_path / "cache/kilnworks/plan.key"
    for damaged in ("", "AAAA", "\xff" * 44):
        path.write_bytes(damaged.encode("latin-1"))
        with pytest.raises(Refused, match=r"plan\.key is damaged: delete it"):
            shard_plan.plan_key()
    path.unlink()
    assert shard_plan.plan_key() == shard_plan.plan_key()


def test_a_key_of_plans_that_cannot_be_written_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KILN_CACHE", str(tmp_path / "file"))
    with pytest.raises(Failed, match=r"Not a directory\): set KILN_CACHE"):
        shard_plan.plan_key()


def test_one_row_changed_added_or_removed_changes_only_its_own_shard(tmp_path: Path) -> None:
    def keys(rows: list[dict[str, Any]]) -> set[str]:
        path = write_list(tmp_path / "a.parquet", rows)
        shards = download.plan(make_recipe({"kind": "urls", "path": path}, shard_size=40)).shards
        return {shard.key for shard in shards}

    rows = many_rows(1000)
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


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ({"kind": "urls", "format": "csv"}, ["a.csv", "b.csv"]),
        ({"kind": "folder"}, ["a.png", "a.txt"]),
        ({"kind": "folder"}, ["metadata.jsonl"]),
    ],
    ids=["list", "pictures", "listed pictures"],
)
def test_a_piece_of_a_source_changes_with_its_files(
    tmp_path: Path, source: dict[str, Any], names: list[str]
) -> None:
    files = [tmp_path / name for name in names]
    for file in files:
        file.write_text("url,caption\n")
    settings = load_recipe("digits", {"source": {**source, "path": str(tmp_path)}}).source

    def identities() -> tuple[str, ...]:
        return tuple(piece.identity for piece in SOURCES[settings.kind](settings).pieces())

    seen = [identities(), identities()]
    for file in files:
        os.utime(file, (1, 1))  # another time, the same size
        seen.append(identities())
    assert seen[0] == seen[1] and len(set(seen[1:])) == 1 + len(files)
