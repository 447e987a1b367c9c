"""The words of each page that a reader meets: `make words`.

README and docs/*.md are counted, without the generated settings.
"""

from __future__ import annotations

from pages import HOME, ROOT

#: Words of a page above which it is two pages.
LONG = 2500


def words() -> dict[str, int]:
    """Path of a page -> its words, of README and docs/*.md but the generated settings."""
    pages = [ROOT / HOME, *sorted((ROOT / "docs").glob("*.md"))]
    counted = {str(page.relative_to(ROOT)): len(page.read_text("utf-8").split()) for page in pages}
    del counted["docs/settings.md"]
    return counted


if __name__ == "__main__":
    found = words()
    for page, count in sorted(found.items(), key=lambda one: -one[1]):
        print(f"{count:6,} {page}{'  too long' if count > LONG else ''}")
    print(f"{sum(found.values()):6,} in {len(found)} pages, without settings and internals")
