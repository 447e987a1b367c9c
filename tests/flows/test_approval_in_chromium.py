"""Candidates are decided on by a person in Chromium, after server and worker were restarted.

With KILN_SCREENSHOTS=FOLDER the test also writes pictures of the pages.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
from chromium import Browser, chromium, require_chromium
from prefect_server import Server

from tasks.publish.registry import Registry

pytestmark = pytest.mark.soak
PATIENCE = 900  # seconds, for a machine that does much else
DEPLOYMENTS = ("finetune/digits", "decide/candidate")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of `make ui`, the two deployments, and a worker."""
    require_chromium()
    found = Server(tmp_path)
    try:
        start(found)
        found.cli("work-pool", "create", "cpu", "--type", "process", "--overwrite")
        for name in DEPLOYMENTS:
            found.cli("deploy", "--name", name, "--prefect-file", "deploy/prefect.yaml")
        yield found
    finally:
        found.stop()


def start(server: Server) -> None:
    server.serve_by_make()
    server.start("worker", "worker", "start", "--pool", "cpu")


def restart(server: Server) -> None:
    server.stop()
    server.children.clear()
    server.wait("the end of the server", lambda: not answers(server), PATIENCE)
    start(server)


def answers(server: Server) -> bool:
    try:
        return bool(server.ask("/health"))
    except URLError:
        return False


def open_page(browser: Browser, ui: str, model: str, text: str) -> None:
    """Open the newest page of a model, which shows a text."""
    browser.open(f"{ui}/artifacts/key/{model}-model", "Created")
    browser.page.locator("a[href*='/artifacts/artifact/']").first.click()
    browser.wait_for(text)


def fill_in(browser: Browser, ui: str, model: str, decision: str, **words: str) -> str:
    """Go from a candidate's page to its form, fill it in, and submit it; the run's id."""
    page = browser.page
    open_page(browser, ui, model, "awaits approval")
    browser.screenshot(f"approval-{model}")
    link = page.get_by_role("link", name="the form").get_attribute("href")
    browser.open(f"{ui}{link}", "Who decides.")
    fields = page.locator(".schema-form-property")
    page.locator(".p-select-button__control").first.press("ArrowDown")  # opens the list
    page.locator(".p-select-option", has_text=decision).click()
    for name, value in words.items():
        label = page.get_by_text(name, exact=True)
        fields.filter(has=label).locator("textarea").fill(value)
    browser.screenshot(f"approval-form-{model}")
    with page.expect_response("**/create_flow_run") as answer:
        page.get_by_role("button", name="Submit").click()
    return str(answer.value.json()["id"])


def test_candidates_are_approved_rejected_and_expire_over_a_restart(
    server: Server, smallest: dict[str, object], tmp_path: Path
) -> None:
    toy: dict[str, Any] = {**smallest, "store": str(tmp_path / "store")}
    ui = server.api.removesuffix("/api")

    def published(name: str, state: str, **settings: Any) -> str:
        given = {f"publish.{setting}": value for setting, value in settings.items()}
        run = server.run("finetune/digits", {**toy, "publish.name": name, **given})
        assert server.ended(run, PATIENCE) == state
        return run

    for name in ("good", "poor", "late"):
        published(name, "Completed")
        days = 30 / 86400 if name == "late" else 14
        manual = {"promote": "manual", "approval_days": days, "license": "cc0-1.0"}
        run = published(name, "Awaiting approval", **manual)
        assert server.tasks(run)["publish"] == "Awaiting approval"
    restart(server)
    registries = {name: Registry(f"{toy['store']}/registry", name) for name in ("good", "poor")}
    with chromium() as browser:
        browser.open(f"{ui}/runs/flow-run/{run}", "Awaiting approval")
        yes = fill_in(browser, ui, "good", "promote", by="anna")
        assert server.ended(yes, PATIENCE) == "Promoted"
        reason = {"reason (Optional)": "strokes are too thin"}
        no = fill_in(browser, ui, "poor", "reject", by="ben", **reason)
        assert server.ended(no, PATIENCE) == "Rejected"
        open_page(browser, ui, "poor", "v2 was rejected by ben: strokes are too thin")
        late = fill_in(browser, ui, "late", "promote", by="anna")
        assert server.ended(late, PATIENCE) == "Failed"
        browser.open(f"{ui}/runs/flow-run/{late}", "v2 expired on")
        assert browser.errors == []
    champions = {name: one.history().champion for name, one in registries.items()}
    assert champions == {"good": "v2", "poor": "v1"}
    assert registries["good"].history().moves[-1]["by"] == "anna"
    published("poor", "Rejected", promote="manual", license="cc0-1.0")
