"""Drive the system's Chromium by Playwright, and record what its pages ask for."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from chips import unless_required

#: Packages of requirements/browser.txt: `make setup-browser`.
PLAYWRIGHT = Path(sys.prefix).with_name(f"{Path(sys.prefix).name}-browser")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
#: Environment variable: folder for screenshots of the pages that the tests open.
SCREENSHOTS = "KILN_SCREENSHOTS"
SECONDS = 180  # timeout of a page, for a busy machine
OPTIONS = ["--no-sandbox", "--disable-gpu"]


def require_chromium(*, driven: bool = True) -> None:
    """Skip the calling test without Chromium; fail it if KILN_MUST_RUN names chromium.

    Args:
        driven: whether the test needs Playwright too.
    """
    reason = "" if CHROMIUM else "no Chromium here: apt-get install chromium"
    if CHROMIUM and driven and not PLAYWRIGHT.is_dir():
        reason = f"no {PLAYWRIGHT.name}: make setup-browser"
    if unless_required("chromium", reason):
        pytest.skip(reason)


@dataclass
class Browser:
    """A page of Chromium."""

    page: Any  # playwright.sync_api.Page
    asked: set[str] = field(default_factory=set)  # host:port of each request; "" of data
    errors: list[str] = field(default_factory=list)  # of scripts, and failed requests

    def open(self, url: str, text: str) -> None:
        """Go to an address and wait until the page shows a text."""
        self.page.goto(url)
        self.wait_for(text)

    def wait_for(self, text: str) -> None:
        self.page.get_by_text(text).first.wait_for()

    def settle(self) -> None:
        """Wait until no request is under way, pictures are decoded and animations are over."""
        self.page.wait_for_load_state("networkidle")
        self.page.evaluate("() => Promise.all([...document.images].map(i => i.decode()))")
        self.page.wait_for_timeout(1000)

    def pictures(self) -> list[dict[str, Any]]:
        """Of each picture inside data URIs: `alt`, `natural` and shown width, and `fits`."""
        found: list[dict[str, Any]] = self.page.evaluate(
            """() => [...document.images].filter(i => i.src.startsWith("data:")).map(i => ({
              alt: i.alt, natural: i.naturalWidth, shown: i.getBoundingClientRect().width,
              fits: i.getBoundingClientRect().right <= innerWidth}))"""
        )
        return found

    def screenshot(self, name: str, **options: Any) -> None:
        """Write NAME.png, if screenshots are wanted."""
        if (folder := os.environ.get(SCREENSHOTS)) is not None:
            self.settle()
            self.page.screenshot(path=f"{folder}/{name}.png", **options)


@contextmanager
def chromium(width: int = 1280, height: int = 900, **options: Any) -> Iterator[Browser]:
    """A page of a new, headless Chromium."""
    sys.path.append(str(PLAYWRIGHT))  # its dependencies in the environment go first
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        size = {"width": width, "height": height}
        page = started.new_context(viewport=size, **options).new_page()
        page.set_default_timeout(SECONDS * 1000)
        browser = Browser(page)
        page.on("request", lambda request: browser.asked.add(urlsplit(request.url).netloc))
        page.on("pageerror", lambda error: browser.errors.append(str(error)))
        page.on("console", lambda said: _record(browser, said))
        page.on("requestfailed", lambda one: _record_failure(browser, one))
        yield browser
        started.close()


def _record(browser: Browser, said: Any) -> None:
    place = said.location.get("url", "")
    # Prefect has no icons there, and answers 503 while SQLite is locked.
    missing = ("/favicon.ico", "/ico/undefined.svg")
    expected = place.endswith(missing) or "status of 503" in said.text
    if said.type == "error" and not expected:
        browser.errors.append(f"{said.text} ({place})")


def _record_failure(browser: Browser, request: Any) -> None:
    if request.failure != "net::ERR_ABORTED":  # a request of a page that was left
        browser.errors.append(f"{request.failure} ({request.url})")
