"""The pages of the site and of llms.txt: README's table "Read on" has them, in reading order.

`python docs/site/pages.py > llms.txt` writes the list for agents (https://llmstxt.org).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOME = "README.md"
HEADING = "## Read on"
#: A link of the table to a page, and a link in text.
PAGE = re.compile(r"\]\(([\w./-]+\.md)\)")
LINK = re.compile(r"!?\[([^]]*)\]\([^)]*\)")
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Section:
    """A row of the table: what a reader wants, and the pages for it."""

    want: str
    pages: list[str]  # paths in the repository


def sections() -> list[Section]:
    """The rows of README's table, each page once."""
    table = (ROOT / HOME).read_text("utf-8").partition(HEADING)[2]
    found, seen = list[Section](), {HOME}
    for want, links in re.findall(r"^\| (.+?) \| (.+) \|$", table, re.MULTILINE)[1:]:
        named = (page for link in PAGE.findall(links) for page in _with_folder(link))
        pages = [page for page in dict.fromkeys(named) if page not in seen]
        seen.update(pages)
        found.append(Section(want[0].upper() + want[1:], pages))
    return found


def _with_folder(page: str) -> list[str]:
    """A page; after a folder's README, the pages of the folder that it links to."""
    path = ROOT / page
    if path.name != HOME or "docs" not in path.parts:
        return [page]
    links = PAGE.findall(path.read_text("utf-8"))
    return [page, *(str(Path(page).parent / link) for link in links if "/" not in link)]


def title_of(page: str) -> str:
    """The heading of a page."""
    text = (ROOT / page).read_text("utf-8")
    return re.findall(r"^# (.+)$", FENCED.sub("", text), re.MULTILINE)[0].replace("`", "")


def summary_of(page: str) -> str:
    """The first sentence of a page, without links; of a page without prose, none."""
    text = FENCED.sub("", (ROOT / page).read_text("utf-8"))
    paragraphs = (part for part in text.split("\n\n") if part.strip())
    prose = next((part for part in paragraphs if part.lstrip()[0] not in "#|<!*-"), "")
    words = " ".join(LINK.sub(r"\1", prose).split())
    return re.split(r"\.\s", words)[0].rstrip(":.")


def llms() -> Iterator[str]:
    """The lines of llms.txt."""
    yield f"# {title_of(HOME)}"
    yield f"\n> {summary_of(HOME)}."
    yield "\nThe command `kiln` runs recipes, which are YAML files; its `--json` is for scripts."
    yield "`kiln mcp` serves it as tools of the Model Context Protocol (docs/commands.md)."
    for section in sections():
        yield f"\n## {section.want}\n"
        for page in section.pages:
            summary = summary_of(page)
            yield f"- [{title_of(page)}]({page})" + (f": {summary}" if summary else "")


if __name__ == "__main__":
    print("\n".join(llms()))
