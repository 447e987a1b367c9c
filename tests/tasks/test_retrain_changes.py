"""What changed in a source since the champion: rows as a set, and the shards that are kept."""

import csv
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from artifacts.image_shards import write_rows, write_tar
from artifacts.store import Store
from configs.load_recipe import load_recipe
from configs.settings.recipe import Recipe
from tasks import download
from tasks.download.shard import STAGE, shard_key
from tasks.download.shard_plan import ShardSpec, plan_key, read_spans, rows_digest
from tasks.retrain.champion import Champion
from tasks.retrain.selection import Changes, plan_changes

pytestmark = pytest.mark.slow

Rows = list[tuple[str, str]]  # (url, caption)
ROWS = [(f"http://example.com/{n}.jpg", f"number {n}") for n in range(200)]
NO_ONE = Champion("v1", "", "d", "", "", "", "", "")


@pytest.fixture
def recipe(tmp_path: Path, own_cache: Path) -> Recipe:
    return load_recipe(
        "digits",
        {
            "store": str(tmp_path / "store"),
            "download.shard_size": 20,
            "source": {"kind": "urls", "format": "csv", "path": str(tmp_path / "list.csv")},
        },
    )


def write(recipe: Recipe, rows: Rows) -> None:
    with Path(recipe.source.path).open("w", newline="") as stream:  # type: ignore[union-attr]
        csv.writer(stream).writerows([("url", "caption"), *rows])


def read(spec: ShardSpec) -> list[bytes]:
    table = read_spans(spec.spans, plan_key())
    return table["hash"].to_pylist()


def publish(recipe: Recipe, plan: download.DownloadPlan, scratch: Path) -> Champion:
    """A champion of the plan's shards, whose pictures all failed."""
    store = Store(recipe.store)
    parts = download.DownloadStage(recipe, plan).parts
    with store.lock(STAGE, parts.key) as lock:
        draft = store.draft(parts, lock)
        for spec in plan.shards:
            hashes = read(spec)
            digest = rows_digest(hashes)
            assert shard_key(recipe.download)(digest) == spec.key and len(hashes) == spec.rows
            write_rows(scratch / "shard.parquet", [{"row_hash": one.hex()} for one in hashes])
            write_tar(scratch / "shard.tar", [])
            files = {suffix: str(scratch / f"shard{suffix}") for suffix in (".tar", ".parquet")}
            draft.add_shard(store.commit_shard(STAGE, spec.key, files, {}))
        artifact = draft.commit({"shards": len(plan.shards)}, {})
    return replace(NO_ONE, images=artifact.key)


@pytest.fixture
def champion(recipe: Recipe, tmp_path: Path) -> Champion:
    """The champion of ROWS."""
    write(recipe, ROWS)
    return publish(recipe, download.plan(recipe), tmp_path)


def changes(recipe: Recipe, champion: Champion, rows: Rows) -> Changes:
    write(recipe, rows)
    return plan_changes(recipe.download, Store(recipe.store), champion, download.plan(recipe))[1]


def test_an_equal_list_has_no_changes_in_any_order(recipe: Recipe, champion: Champion) -> None:
    shards = len(download.plan(recipe).shards)
    for rows in (ROWS, ROWS[::-1], random.Random(0).sample(ROWS, 200)):
        found = changes(recipe, champion, rows)
        assert (found.new_rows, found.removed_rows, found.rows_to_fetch) == (0, 0, 0)
        assert (found.kept_shards, found.new_shards) == (shards, 0)


def test_only_added_rows_are_fetched_wherever_they_are(recipe: Recipe, champion: Champion) -> None:
    added = [(f"http://example.com/new/{n}.jpg", f"new {n}") for n in range(30)]
    scattered = random.Random(0).sample(ROWS + added, 230)
    for rows in (ROWS + added, added + ROWS, scattered):
        found = changes(recipe, champion, rows)
        assert (found.new_rows, found.removed_rows, found.rows_to_fetch) == (30, 0, 30)


def test_a_removed_row_leaves_the_plan_with_its_shard_alone(
    recipe: Recipe, champion: Champion
) -> None:
    shards = len(download.plan(recipe).shards)
    found = changes(recipe, champion, ROWS[:100] + ROWS[101:])
    assert (found.new_rows, found.removed_rows) == (0, 1)
    assert found.kept_shards == shards - 1 and 0 < found.rows_to_fetch < 40


def test_new_rows_are_those_that_meet_the_condition_of_the_source(
    recipe: Recipe, tmp_path: Path
) -> None:
    """A wider condition adds the rows that it newly admits; a narrower one removes rows."""

    def where(condition: str) -> Recipe:
        source = recipe.source.model_copy(update={"where": condition})
        return recipe.model_copy(update={"source": source})

    even = where("right(caption, 1) in ('0', '2', '4', '6', '8')")
    write(even, ROWS)
    champion = publish(even, download.plan(even), tmp_path)
    added = [(f"http://example.com/new/{n}.jpg", f"new {n}") for n in range(30)]
    found = changes(even, champion, ROWS + added)
    assert (found.rows, found.new_rows, found.removed_rows) == (115, 15, 0)
    found = changes(where("caption <> ''"), champion, ROWS)
    assert (found.new_rows, found.removed_rows) == (100, 0)
    found = changes(where("right(caption, 1) = '0'"), champion, ROWS)
    assert (found.new_rows, found.removed_rows) == (0, 80)


def test_another_caption_is_a_new_row_and_a_removed_one(recipe: Recipe, champion: Champion) -> None:
    found = changes(recipe, champion, [(ROWS[0][0], "another"), *ROWS[1:]])
    assert (found.new_rows, found.removed_rows) == (1, 1)


def test_other_settings_of_the_download_keep_no_shard_and_add_no_row(
    recipe: Recipe, champion: Champion
) -> None:
    larger = recipe.download.model_copy(update={"image_size": 64})
    found = changes(recipe.model_copy(update={"download": larger}), champion, ROWS)
    assert (found.kept_shards, found.new_rows, found.rows_to_fetch) == (0, 0, 200)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 2, 3))])
def test_a_plan_after_random_changes_has_each_row_of_the_list_once(
    recipe: Recipe, champion: Champion, tmp_path: Path, seed: int
) -> None:
    """Each champion is of the plan before, whose shards do not follow from the list alone."""
    draw, rows, store = random.Random(seed), ROWS, Store(recipe.store)
    for turn in range(4):
        before = set(rows)
        added = [(f"http://example.com/{turn}/{n}.jpg", str(n)) for n in range(draw.randrange(40))]
        kept = draw.sample(rows, len(rows) - draw.choice([0, 3]))
        rows = draw.sample(kept + added, len(kept) + len(added))
        write(recipe, rows)
        plan, found = plan_changes(recipe.download, store, champion, download.plan(recipe))
        assert (found.new_rows, found.removed_rows) == (len(added), len(before - set(rows)))
        planned = [one for spec in plan.shards for one in read(spec)]
        whole = [one for spec in download.plan(recipe).shards for one in read(spec)]
        assert sorted(planned) == sorted(whole)
        champion = publish(recipe, plan, tmp_path)


def test_equal_rows_are_planned_at_their_first_place(recipe: Recipe, champion: Champion) -> None:
    """Places of embedded pictures are read in order, so a shard's spans must ascend."""
    added = [(f"http://example.com/new/{n}.jpg", f"new {n}") for n in range(30)]
    write(recipe, added + ROWS + added[:15])
    plan, found = plan_changes(
        recipe.download, Store(recipe.store), champion, download.plan(recipe)
    )
    assert found.new_rows == 30
    for spec in plan.shards:
        places = [(span.file, span.group, span.start) for span in spec.spans]
        assert places == sorted(places)


def test_the_rows_of_a_damaged_shard_are_fetched_again(
    recipe: Recipe, champion: Champion, caplog: pytest.LogCaptureFixture
) -> None:
    """The row hashes of each shard with new neighbours are compared, so they must be right."""
    store, more = Store(recipe.store), [("http://example.com/new.jpg", "new")]
    whole = changes(recipe, champion, [*reversed(ROWS), *more])
    assert (whole.new_rows, whole.rows_to_fetch) == (1, 1)
    for path in Path(store.shards_path(STAGE)).glob("*.parquet"):
        data, at = bytearray(path.read_bytes()), path.stat()
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))
    found = changes(recipe, champion, [*reversed(ROWS), *more])
    assert (found.rows_to_fetch, found.removed_rows) == (201, 0)
    assert "is damaged" in caplog.text
