"""The pages of `make ui` in Chromium, with real runs by a worker: form, graph, artifacts, report.

With KILN_SCREENSHOTS=FOLDER the tests also write pictures of the pages.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Browser, chromium, require_chromium
from prefect_server import Server, deployed

from configs.settings.recipe import STAGES

pytestmark = pytest.mark.soak
PATIENCE = 900  # seconds, for a machine that does much else
RATE = "train.learning_rate"
#: Stage -> pictures in its artifact.
PICTURES = {
    "download": ["Some of the pictures"],
    "encode": [],
    "train": ["Loss", "Samples while training"],
    "evaluate": ["Before and after", "Metrics", "Samples closest to training pictures"],
    "publish": ["Lineage"],
    "model": [],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of `make ui` on a free port, all deployments, and a worker."""
    require_chromium()
    folder = tmp_path_factory.mktemp("ui")
    main = Server(folder)
    try:
        main.serve_by_make()
        with deployed(folder, main.api) as found:
            yield found
    finally:
        main.stop()


@pytest.fixture(scope="module")
def ui(server: Server) -> str:
    return server.api.removesuffix("/api")


@pytest.fixture
def browser(server: Server) -> Iterator[Browser]:
    """A page; the test fails if it asked another host or port, or had an error."""
    with chromium() as found:
        yield found
        found.settle()
        assert found.asked <= {server.api.split("/")[2], ""}
        assert found.errors == []


@pytest.fixture(scope="module")
def toy(smallest: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Overrides of all runs here: toy sizes, one store."""
    return {**smallest, "store": str(tmp_path_factory.mktemp("store"))}


@pytest.fixture(scope="module")
def published(server: Server, ui: str, toy: dict[str, object]) -> str:
    """Id of a run that was started from the form."""
    with chromium() as browser:
        run = submit_form(browser, server, ui, toy)
        assert browser.errors == []
    assert server.ended(run, PATIENCE) == "Completed"
    return run


def submit_form(
    browser: Browser, server: Server, ui: str, overrides: dict[str, object], name: str = ""
) -> str:
    """Fill the form of `finetune/digits` as its reader would, and submit it; the run's id."""
    deployment = server.ask("/deployments/name/finetune/digits")["id"]
    browser.open(f"{ui}/deployments/deployment/{deployment}/run", "overrides (Optional)")
    browser.page.locator(".p-code-input textarea").fill(json.dumps(overrides, indent=1))
    if name:
        browser.screenshot(name, full_page=True)
    for _ in range(20):
        with browser.page.expect_response("**/create_flow_run") as answer:
            browser.page.get_by_role("button", name="Submit").click()
        if answer.value.status != 503:  # SQLite was locked, by other runs
            break
    return str(answer.value.json()["id"])


def open_artifact(browser: Browser, server: Server, ui: str, run: str, key: str) -> None:
    """Open a run's newest artifact of a key."""
    asked = {"artifacts": {"flow_run_id": {"any_": [run]}, "key": {"any_": [key]}}}
    found = max(server.ask("/artifacts/filter", asked), key=lambda one: one["created"])
    browser.open(f"{ui}/artifacts/artifact/{found['id']}", "Flow Run")
    browser.page.locator(".markdown-renderer h1").first.wait_for()
    browser.settle()


def check_pictures(browser: Browser, titles: list[str]) -> None:
    """Each picture of an artifact is drawn, named and no wider than the page."""
    found = browser.pictures()
    assert [one["alt"] for one in found] == titles
    assert all(one["natural"] > 0 and one["shown"] > 0 and one["fits"] for one in found)


def test_the_pages_of_make_ui_ask_its_own_port_alone(
    server: Server, ui: str, browser: Browser
) -> None:
    browser.open(ui, "Dashboard")
    browser.settle()
    assert browser.page.url.startswith(f"{ui}/dashboard"), "the first version of the UI"
    assert browser.asked - {""} == {server.api.split("/")[2]}


def test_a_run_of_the_form_has_its_overrides(
    server: Server, toy: dict[str, object], published: str
) -> None:
    assert server.ask(f"/flow_runs/{published}")["parameters"]["overrides"] == toy
    assert server.tasks(published) == dict.fromkeys(STAGES, "Completed")


def test_an_unknown_setting_of_the_form_is_explained_on_the_runs_page(
    server: Server, ui: str, toy: dict[str, object], browser: Browser
) -> None:
    run = submit_form(browser, server, ui, {**toy, "train.stps": 4}, "prefect-form")
    assert server.ended(run, PATIENCE) == "Failed"
    browser.open(f"{ui}/runs/flow-run/{run}", "did you mean train.steps")
    assert server.tasks(run) == {}


@pytest.mark.parametrize("stage", PICTURES)
def test_an_artifact_has_its_pictures_and_links_to_the_stages_before(
    server: Server, ui: str, published: str, browser: Browser, stage: str
) -> None:
    open_artifact(browser, server, ui, published, f"digits-{stage}")
    browser.screenshot(f"artifact-{stage}", full_page=True)
    check_pictures(browser, PICTURES[stage])
    page = browser.page
    assert not any(cell.strip() == "" for cell in page.locator("thead").all_inner_texts())
    before = list(STAGES) if stage == "model" else list(STAGES[: STAGES.index(stage)])
    links = page.locator("a[href^='/artifacts/key/digits-']")
    shown = [text for text in links.all_inner_texts() if text in STAGES]
    assert shown == before
    if before:
        path = links.filter(has_text=before[-1]).last.get_attribute("href")
        assert path == f"/artifacts/key/digits-{before[-1]}"
        browser.open(f"{ui}{path}", f"digits-{before[-1]}")


def test_the_graph_has_its_edges(server: Server, ui: str, published: str, browser: Browser) -> None:
    with browser.page.expect_response("**/graph-v2*") as answer:
        browser.open(f"{ui}/runs/flow-run/{published}", "Task Runs")
    nodes = {node["label"]: node for _, node in answer.value.json()["nodes"]}
    assert {name: len({one["id"] for one in node["parents"]}) for name, node in nodes.items()} == {
        "download": 0,
        "encode": 1,
        "train": 1,
        "evaluate": 3,
        "publish": 4,
    }
    browser.settle()
    assert browser.page.locator("canvas").first.is_visible(), "it is drawn by WebGL, not in the DOM"


def test_a_rejected_run_is_no_failed_one(
    server: Server, ui: str, toy: dict[str, object], published: str, browser: Browser
) -> None:
    strict = {**toy, "publish.gate": ["digit/new >= 1.1"], "publish.name": "chalk"}
    run = submit_form(browser, server, ui, strict)
    assert server.ended(run, PATIENCE) == "Rejected"
    browser.open(f"{ui}/runs/flow-run/{run}?tab=Task+Runs", "Rejected")
    assert server.tasks(run) == {**dict.fromkeys(STAGES, "Reused"), "publish": "Rejected"}
    browser.screenshot("prefect-ui")
    open_artifact(browser, server, ui, run, "chalk-publish")
    assert "publish: rejected by the gate" in browser.page.inner_text("body")


def test_the_sweeps_artifact_has_its_trials_and_curves(
    server: Server, ui: str, toy: dict[str, object], published: str, browser: Browser
) -> None:
    run = server.run("sweep/digits", {**toy, "sweep.values": {RATE: [1e-3, 5e-4]}})
    assert server.ended(run, PATIENCE) == "Completed"
    open_artifact(browser, server, ui, run, "digits-sweep")
    browser.screenshot("sweep", full_page=True)
    check_pictures(browser, ["Loss of each trial"])
    trials = browser.page.locator("table").first.locator("tbody tr").all_inner_texts()
    assert [row.split()[-1] for row in trials] == ["best", "measured"]


def test_the_summary_of_a_retraining_has_both_models(
    server: Server, ui: str, toy: dict[str, object], published: str, browser: Browser
) -> None:
    more = {**toy, "source.rehearsal": 40, "retrain.epochs": 1}
    run = server.run("retrain/digits", more)
    assert server.ended(run, PATIENCE) == "Completed"
    open_artifact(browser, server, ui, run, "digits-retrain")
    browser.screenshot("retraining", full_page=True)
    titles = [one["alt"] for one in browser.pictures()]
    assert titles[:2] == ["Base above, new model below", PICTURES["evaluate"][-1]]
    assert len(titles) == 3
    check_pictures(browser, titles)
    links = browser.page.locator("a[href^='/artifacts/key/digits-']").all_inner_texts()
    assert [text for text in links if text in STAGES] == list(STAGES)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_opens_from_disk(
    toy: dict[str, Any], published: str, scheme: str, tmp_path: Path
) -> None:
    report = Path(toy["store"]) / "registry" / "digits" / "v1" / "report.html"
    with chromium(color_scheme=scheme) as browser:
        browser.open(f"file://{report}", "What was built, and why")
        browser.settle()
        browser.screenshot(f"report-{scheme}", full_page=True)
        shown = [one for one in browser.pictures() if one["shown"] > 0]
        assert len(shown) > 5 and all(one["natural"] > 0 and one["fits"] for one in shown)
        assert browser.errors == [] and browser.asked == {""}
