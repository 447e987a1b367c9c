"""Plans see the references of rows, and a target's shard does not change with them."""

import logging
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
from source_rows import context, make_recipe, many_rows, write_list

from configs.errors import Refused
from configs.load_recipe import load_retrained
from configs.settings.recipe import Recipe
from runtimes.families import all_families
from runtimes.pipeline_folder.folder import Base
from tasks import download
from tasks.download.references import check_number
from tasks.download.shard import planned_rows
from tasks.download.shard_plan import INDEX, plan_key, read_spans
from tasks.preflight import _check_references

pytestmark = pytest.mark.usefixtures("own_cache")
ROWS = many_rows(30)
Rows = list[dict[str, Any]]


def with_references(name: str) -> Rows:
    """Each but the last row has one or two references."""
    named = [[f"http://h/{name}{n}", "http://h/all"][: 1 + n % 2] for n in range(len(ROWS) - 1)]
    return [{**row, "before": own} for row, own in zip(ROWS, [*named, []], strict=True)]


def recipe_of(folder: Path, rows: Rows, size: int = 1, **source: Any) -> Recipe:
    """A recipe of a list; a shard of size 1 has one row."""
    path = write_list(folder / "list.parquet", rows)
    columns = {"reference_columns": ["before"], **source}
    settings = {"kind": "urls", "path": path, **columns}
    return make_recipe(settings, folder / "store", shard_size=size)


def rows_of(plan: download.DownloadPlan) -> Rows:
    tables = [read_spans(spec.spans, plan_key()) for spec in plan.shards]
    rows = [row for table in tables for row in table.to_pylist()]
    return [
        {"url": row["url"], "before": [r["url"] for r in row["references"] or ()]} for row in rows
    ]


def plainly(rows: Rows) -> Rows:
    return [{name: row[name] for name in ("url", "before")} for row in rows]


def test_shards_of_targets_do_not_change_with_their_references(tmp_path: Path) -> None:
    without = download.plan(recipe_of(tmp_path, ROWS, 5, reference_columns=[]))
    first = download.plan(recipe_of(tmp_path, with_references("a"), 5))
    other = download.plan(recipe_of(tmp_path, with_references("b"), 5))
    for plan in (first, other):
        assert [spec.key for spec in plan.shards] == [spec.key for spec in without.shards]
        assert (plan.source_digest, plan.layout) == (without.source_digest, None)
    assert first.artifact.key != other.artifact.key
    assert rows_of(other) == plainly(with_references("b"))
    assert first.artifact.summary["most_references"] == 2


def test_plans_without_references_have_no_column_of_theirs(tmp_path: Path) -> None:
    """Their keys and bytes are as before."""
    plan = download.plan(recipe_of(tmp_path, ROWS, 5, reference_columns=[]))
    index = pq.ParquetFile(BytesIO(plan.artifact.read(INDEX))).schema_arrow
    assert index.names == ["digest", "rows", "file", "group"]
    assert "most_references" not in plan.artifact.summary
    files = [*(tmp_path / "store/plan/shards").glob("*.parquet")]
    assert len(files) == 2
    for file in files:
        assert not any("reference" in name for name in pq.read_schema(file).names)


def test_equal_rows_with_other_references_are_shards_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = with_references("a")
    new = [{**old[0], "before": ["http://h/new"]}, *old[1:]]
    once = download.plan(recipe_of(tmp_path, old))
    assert len(once.shards) == len(ROWS)
    recipe = recipe_of(tmp_path, [*old, *new])
    with caplog.at_level(logging.WARNING):
        twice = download.plan(recipe)
    assert caplog.text.count("repeat an earlier shard") == len(ROWS) - 1
    assert rows_of(twice) == plainly([*old, new[0]])
    keys = [spec.key for spec in twice.shards]
    assert keys[:-1] == [spec.key for spec in once.shards] and keys[-1] not in keys[:-1]
    assert twice.layout is not None, "else its images would have the key of those without it"
    [row] = planned_rows(twice.shards[-1], context(recipe), tmp_path)
    assert row.url == ROWS[0]["url"]


@pytest.mark.parametrize("size", [1, 5])
def test_a_plan_of_another_machine_keeps_the_references_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """The source may have equal rows with others by then."""
    sent = download.plan(recipe_of(tmp_path, with_references("a"), size)).artifact
    monkeypatch.setenv("KILN_CACHE", str(tmp_path / "another"))
    grown = [*with_references("b"), *with_references("a")]
    placed = download.planned(recipe_of(tmp_path, grown, size), sent)
    assert rows_of(placed) == plainly(with_references("a"))
    with pytest.raises(Refused, match="no longer has all rows"):
        download.planned(recipe_of(tmp_path, with_references("b"), size), sent)


def test_more_references_than_a_family_reads_are_refused(tmp_path: Path) -> None:
    kontext, flux2 = (all_families()[name] for name in ("flux_kontext", "flux2"))
    check_number(flux2, 2, "a picture has")
    with pytest.raises(Refused, match=r"source: a picture has 2 references, .* reads 1: remove"):
        check_number(kontext, 2, "a picture has")
    with pytest.raises(Refused, match=r"has 1 reference, but family sd does not read any"):
        check_number(all_families()["sd"], 1, "a picture has")
    recipe = recipe_of(tmp_path, with_references("a"), reference_columns=["before", "url"])
    _check_references(recipe, cast(Base, SimpleNamespace(family=flux2)))
    with pytest.raises(Refused, match=r"source: its settings name 2 references, .* reads 1"):
        _check_references(recipe, cast(Base, SimpleNamespace(family=kontext)))


def test_a_recipe_with_references_is_not_retrained() -> None:
    assert load_retrained("digits", {}).retrain.start == "champion"
    with pytest.raises(Refused, match=r"source: a retraining selects no references.*`kiln run`"):
        load_retrained("digits", {"source.edit": True, "encode.flip": False})
