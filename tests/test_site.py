"""Readers and agents find every page: README's table, llms.txt and the site have it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from chromium import chromium, require_chromium
from kiln_command import ROOT

sys.path.append(str(ROOT / "docs/site"))
import pages
import words

MKDOCS = Path(sys.prefix).with_name(f"{Path(sys.prefix).name}-site")
needs_mkdocs = pytest.mark.skipif(not MKDOCS.is_dir(), reason=f"no {MKDOCS.name}: make setup-site")
#: README of a small repository.
HOME = """\
# Small

[setup](docs/setup.md) and [a recipe](configs/a.yaml), [tools](tools)

## Read on

| you want to | page |
|---|---|
| begin | [setup](docs/setup.md#one--two) |
"""


def test_no_page_is_too_long_to_read() -> None:
    assert [page for page, count in words.words().items() if count > words.LONG] == []


def build(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a repository to a folder, as `make site`."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(MKDOCS), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_table_of_the_readme_leads_to_every_page() -> None:
    listed = [page for section in pages.sections() for page in section.pages]
    there = {str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")}
    assert there - set(listed) == set(), 'add it to the table "Read on" of README.md'
    assert len(listed) == len(set(listed))


def test_llms_txt_is_of_these_pages() -> None:
    words = [sys.executable, "docs/site/pages.py"]
    made = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    written = (ROOT / "llms.txt").read_text(encoding="utf-8")
    assert written == made, "python docs/site/pages.py > llms.txt"


@needs_mkdocs
@pytest.mark.slow
def test_the_site_is_whole_and_asks_no_other_host(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    for section in pages.sections():
        for page in section.pages:
            path = page.removeprefix("docs/").replace("README.md", "index.md")
            assert (tmp_path / path).with_suffix(".html").is_file(), page
    (tmp_path / "404.html").unlink()  # MkDocs leads from it to the root of a host
    for file in tmp_path.glob("**/*.html"):
        text = file.read_text(encoding="utf-8")
        for place in re.findall(r'<(?:script|img|iframe)\b[^>]* src="([^"]+)', text):
            assert place.startswith("data:") or (file.parent / place).is_file(), (file, place)
        styles = re.findall(r'<link\b[^>]* href="([^"]+)', text)
        assert not [place for place in styles if "//" in place], file


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A small repository with this one's MkDocs settings and hooks."""
    root = tmp_path / "small"
    shutil.copytree(ROOT / "docs/site", root / "docs/site")
    shutil.copy(ROOT / "mkdocs.yml", root)
    for path, text in {
        "README.md": HOME,
        "docs/setup.md": "# Setup\n\nHere.\n\n## One & two\n\n[report](examples.txt)\n",
        "docs/examples.txt": "plain\n",
        "configs/a.yaml": "name: a\n",
        "tools/b.py": "print(1)\n",
        "build/examples/report.html": "<p>a report</p>",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return root


@needs_mkdocs
@pytest.mark.slow
def test_links_to_files_lead_to_pages_that_show_them(small: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = build(small, site)
    assert done.returncode == 0, done.stderr
    home = (site / "index.html").read_text(encoding="utf-8")
    for place in ("setup.html", "configs/a.yaml.html", "tools.html", "setup.html#one--two"):
        assert f'href="{place}"' in home
    assert "name" in (site / "configs/a.yaml.html").read_text(encoding="utf-8")
    assert 'href="tools/b.py.html"' in (site / "tools.html").read_text(encoding="utf-8")
    assert 'href="examples/report.html"' in (site / "examples.html").read_text(encoding="utf-8")
    assert (site / "examples/report.html").read_text(encoding="utf-8") == "<p>a report</p>"


@needs_mkdocs
@pytest.mark.slow
@pytest.mark.parametrize("link", ["[x](nowhere.md)", "[x](../configs/b.yaml)", "[x](#nowhere)"])
def test_a_wrong_link_fails(link: str, small: Path, tmp_path: Path) -> None:
    with (small / "docs/setup.md").open("a", encoding="utf-8") as file:
        file.write(link)
    done = build(small, tmp_path / "site")
    assert done.returncode == 1 and "docs/setup.md" in done.stderr


@needs_mkdocs
@pytest.mark.slow
@pytest.mark.soak
def test_a_phone_searches_without_a_server(tmp_path: Path) -> None:
    require_chromium()
    assert build(ROOT, tmp_path).returncode == 0
    with chromium(390, 844) as browser:
        browser.open((tmp_path / "settings.html").as_uri(), "All settings of a recipe")
        browser.screenshot("site-phone")
        widths = browser.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert widths[0] <= widths[1]
        browser.page.locator("label.md-header__button[for=__search]").click()
        browser.page.locator("input.md-search__input").press_sequentially("learning rate")
        browser.page.locator(".md-search-result__item").first.wait_for()
        browser.screenshot("site-search")
        assert (browser.asked, browser.errors) == ({""}, [])
