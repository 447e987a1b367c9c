"""Rows with transient failures are fetched again on request, as often as the recipe allows."""

from pathlib import Path

import pytest
from download_stage import PICTURES, build, make_recipe, rows, rows_of, shard_bytes
from picture_server import Web

from artifacts.store import Store
from configs.errors import Failed
from tasks import download
from tasks.download import DownloadStage

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


def test_only_rows_with_transient_failures_are_fetched_again_on_request(
    tmp_path: Path, web: Web
) -> None:
    web.broken = {"3", "17"}
    recipe = make_recipe(tmp_path, web, rows("gone/1"), retries=0, shard_size=100)
    first = build(recipe)
    assert first.summary["outcomes"] == {"http 404": 1, "http 503": 2, "success": PICTURES - 2}
    web.broken = set()
    web.requests.clear()
    assert build(recipe).digest == first.digest
    assert not web.requests
    second = build(recipe, retry_failed=True)
    assert second.key != first.key
    assert second.summary["outcomes"] == {"http 404": 1, "success": PICTURES}
    assert web.requests == {"/good/3": 1, "/good/17": 1}
    web.requests.clear()
    for retry_failed in (True, False):  # without a transient failure no retry is left
        assert build(recipe, retry_failed=retry_failed).key == second.key
    assert not web.requests
    never_broken = build(make_recipe(tmp_path, web, rows("gone/1"), store="other", shard_size=100))
    assert shard_bytes(second) == shard_bytes(never_broken)


def test_a_row_is_fetched_again_by_as_many_runs_as_the_recipe_allows(
    tmp_path: Path, web: Web
) -> None:
    web.broken = {"3"}
    recipe = make_recipe(tmp_path, web, rows("gone/1"), retry_failed=2, shard_size=100)
    requests, attempts = [], []
    for retry_failed in (True, True, True, True, False):
        web.requests.clear()
        artifact = build(recipe, retry_failed=retry_failed)
        requests.append(web.requests["/good/3"])
        attempts.append(rows_of(artifact)["good/3"]["attempts"])
    assert requests == [2, 2, 2, 0, 0]
    assert attempts == [2, 4, 6, 6, 6]
    assert rows_of(artifact)["gone/1"]["attempts"] == 1
    assert rows_of(artifact)["good/4"]["attempts"] is None  # a picture has no failure
    kinds = {row["outcome"]: row["failure"] for row in DownloadStage.show(artifact)[1].rows}
    assert kinds == {"success": "", "http 404": "permanent", "http 503": "transient"}


def test_a_later_try_of_a_run_fetches_no_row_again_that_the_run_fetched_again(
    tmp_path: Path, web: Web
) -> None:
    """Else the tries of one run after an outage could use up what the recipe allows to runs."""
    web.broken = {"3"}
    recipe = make_recipe(tmp_path, web, rows("gone/1"), retries=0, shard_size=100)
    build(recipe)
    plan, requests = download.plan(recipe), []
    for run in ("one", "one", "two"):
        web.requests.clear()
        stage = DownloadStage(recipe, plan, 1, run)
        stage.build(Store(recipe.store).draft(stage.parts), lambda *_: None)  # not committed
        requests.append(web.requests["/good/3"])
    assert requests == [1, 0, 1]


def test_the_bytes_and_times_of_a_shard_are_those_of_all_its_downloads(
    tmp_path: Path, web: Web
) -> None:
    web.broken = {"3"}
    recipe = make_recipe(tmp_path, web, rows(), retries=0, shard_size=100)
    first = build(recipe).summary["data"]
    web.broken = set()
    again = build(recipe, retry_failed=True).summary["data"]
    whole = build(make_recipe(tmp_path, web, rows(), store="other", shard_size=100))
    assert first["bytes"] < again["bytes"] == whole.summary["data"]["bytes"]


def test_a_retry_is_possible_after_too_many_failures(tmp_path: Path, web: Web) -> None:
    web.broken = {"3"}
    recipe = make_recipe(tmp_path, web, rows(), retries=0, max_failed=0.0)
    with pytest.raises(Failed, match="--retry-failed fetches those with transient"):
        build(recipe)
    web.broken = set()
    web.requests.clear()
    assert build(recipe, retry_failed=True).summary["images"] == PICTURES
    assert web.requests == {"/good/3": 1}
