"""Hooks of MkDocs: the site has README, the pages of docs/, and what these link to.

The repository has no public address, so a link to one of its files leads to a page that shows it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pages import HOME, ROOT, sections

#: Files that browsers show, or programs read, as they are.
AS_IS = (".png", ".json", ".html", ".txt")
#: Extension of a file -> language of its highlighting.
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", "": "docker"}
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
TARGET = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
#: Pages, and folders of pages, that a search shows after the others.
FOR_FEW = ("docs/benchmarks", "docs/internals/", "CHANGELOG.md", "CONTRIBUTING.md", "tests/")
#: Pages that a run of the demo writes; `make site` copies them here.
EXAMPLES = ROOT / "build/examples"
EXAMPLE_PAGES = {
    "report.html": "the report of its newest model: every stage, metric and picture",
    "data.html": "its data page: counts of pictures by stage and reason, with examples",
}


def on_config(config: Any) -> Any:
    """Order the pages as README does, and make anchors as GitHub does."""
    nav: list[Any] = [{"Home": HOME}]
    nav += [{section.want: section.pages} for section in sections()]
    if _examples():
        nav.insert(1, {"Examples": "examples.md"})
    config.nav = nav
    config.mdx_configs["toc"]["slugify"] = anchor
    return config


def anchor(heading: str, _: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def on_files(files: Files, config: Any) -> Files:
    """The pages, all that they link to, and the theme's own files.

    Their addresses are their paths in the repository.
    """
    found = Files([file for file in files if file.src_dir != config.docs_dir])
    waiting = [HOME, *(page for section in sections() for page in section.pages)]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        found.append(_file(path, config))
        linked = {target for link in _links(path) if (target := _target(path, link))}
        waiting += sorted(linked - seen)
        seen |= linked
    script = ROOT / "docs/site/iframe-worker.js"
    found.append(File.generated(config, script.name, abs_src_path=str(script)))
    if examples := _examples():
        for name in examples:
            file = EXAMPLES / name
            found.append(File.generated(config, f"examples/{name}", abs_src_path=str(file)))
        found.append(File.generated(config, "examples.md", content="\n".join(_example_lines())))
    return found


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to the pages that show files."""
    path = page.file.src_uri
    if path.startswith(FOR_FEW):
        page.meta["search"] = {"boost": 0.3}
    if not (ROOT / path).is_file():  # a page that shows a file
        return markdown

    def moved(match: re.Match[str]) -> str:
        target = _target(path, match[1])
        if target is None:
            return match[1]
        return os.path.relpath(_uri(target), Path(path).parent)

    parts = re.split(rf"({FENCE.pattern})", markdown, flags=FENCE.flags)
    return "".join(part if n % 2 else TARGET.sub(moved, part) for n, part in enumerate(parts))


def _target(page: str, link: str) -> str | None:
    """The file or folder of the repository that a link of a page leads to; None of no file.

    A folder with a README is its README.
    """
    path = (ROOT / page).parent / link
    path = path / HOME if (path / HOME).is_file() else path
    resolved = path.resolve()
    if not resolved.exists() or not resolved.is_relative_to(ROOT):
        return None
    return str(resolved.relative_to(ROOT))


def _uri(path: str) -> str:
    """The site's source of a file of the repository: itself, or the page that shows it."""
    return path if path.endswith((".md", *AS_IS)) else f"{path}.md"


def _links(path: str) -> Iterator[str]:
    """The links of a page, and of a folder its files."""
    if (ROOT / path).is_dir():
        files = (file for file in sorted((ROOT / path).iterdir()) if file.name != "__pycache__")
        yield from (f"{Path(path).name}/{file.name}" for file in files)
    elif path.endswith(".md"):
        yield from TARGET.findall(FENCE.sub("", (ROOT / path).read_text("utf-8")))


def _file(path: str, config: Any) -> File:
    uri = _uri(path)
    if uri == path:
        file = File.generated(config, uri, abs_src_path=str(ROOT / path))
    else:
        lines = "\n".join(_shown(path))
        front = "---\nsearch: {exclude: true}\nhide: [toc]\n---\n"
        file = File.generated(config, uri, content=f"{front}# {path}\n\n{lines}\n")
    # Pages of docs/ have short addresses.
    file.dest_uri = file.dest_uri.removeprefix("docs/")
    return file


def _shown(path: str) -> Iterator[str]:
    """The lines of a page that shows a file, or the files of a folder."""
    if (ROOT / path).is_dir():
        for link in _links(path):
            yield f"* [{Path(link).name}]({_uri(link)})"
        return
    yield f"~~~~~{LANGUAGES.get(Path(path).suffix, 'text')}"
    yield (ROOT / path).read_text("utf-8").rstrip("\n")
    yield "~~~~~"


def _examples() -> list[str]:
    """The pages of the demo that are there."""
    return [name for name in EXAMPLE_PAGES if (EXAMPLES / name).is_file()]


def _example_lines() -> Iterator[str]:
    """The page of examples."""
    yield "# Examples\n"
    yield "`make demo` wrote these pages on the machine that built this site:\n"
    for name in _examples():
        yield f"* [{name}](examples/{name}): {EXAMPLE_PAGES[name]}"
