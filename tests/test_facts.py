"""Numbers that two pages say of one recipe agree.

In a row of a table or a sentence that names one recipe, the numbers of a unit are its facts. The
unit stands beside the number, or in the head of its column. Of two pages that give a recipe numbers
of a unit, one has all numbers of the other. Text with changed settings (`-o`, `=`) and code is
about another recipe, and left out.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations

import pytest
from kiln_command import ROOT

RECIPES = {path.stem for path in ROOT.glob("configs/*.yaml")}
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
UNIT = r"(GiB|GB(?!/)|hours?|images/s|pictures/s|TFLOP)"
#: A number in front of its unit.
MEASURE = re.compile(rf"(?<![\w.,-])(\d[\d,]*(?:\.\d+)?) ?{UNIT}(?!\w)")
NUMBER = re.compile(r"(?<![\w.-])\d+(?:\.\d+)?(?!\w)")
#: Names of cards, which are no measures.
CARD = re.compile(r"\b(?:on an? |RTX )\d{4}\b")
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)

Facts = dict[tuple[str, str], set[str]]


def rows(text: str) -> Iterator[tuple[str, str]]:
    """Each row of a table and each sentence, as the text that names a recipe and its measures."""
    head: list[str] = []
    for block in re.split(r"\n(?=\||\n|\* )", CODE.sub("", text)):
        block = block.strip("\n")
        if not block.startswith("|"):
            head = []
            yield from ((part, part) for part in re.split(r"(?<=[.;:])\s", block))
            continue
        cells = [cell.strip() for cell in block.strip("|").split("|")]
        head = head or cells
        measures = []
        for title, cell in zip(head, cells, strict=False):
            unit = re.search(rf"\b{UNIT}\b", title)
            plain = unit and not MEASURE.search(cell)
            cell = CARD.sub("", cell)
            measures.append(NUMBER.sub(rf"\g<0> {unit[1]}", cell) if plain and unit else cell)
        yield cells[0], " | ".join(measures)


def facts(text: str) -> Facts:
    """Recipe and unit -> numbers of a page."""
    found: Facts = defaultdict(set)
    for subject, measures in rows(text):
        named = set(re.findall(r"`([\w-]+)`", subject)) & RECIPES
        if len(named) == 1 and not re.search(r"-o |\w=\w", measures):
            (recipe,) = named
            for number, unit in MEASURE.findall(measures):
                found[recipe, unit.rstrip("s")].add(number)
    return found


def differences(pages: dict[str, str]) -> list[str]:
    """What two pages say differently."""
    told = []
    for (one, first), (two, second) in combinations(
        ((page, facts(text)) for page, text in pages.items()), 2
    ):
        for key in sorted(set(first) & set(second)):
            if not (first[key] <= second[key] or second[key] <= first[key]):
                apart = f"{sorted(first[key] - second[key])} and {sorted(second[key] - first[key])}"
                told.append(f"{' '.join(key)}: {one} and {two} say {apart}")
    return told


def test_pages_agree_on_the_numbers_of_a_recipe() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in PAGES}
    del texts["docs/settings.md"]
    read = {page: len(facts(text)) for page, text in texts.items()}
    assert min(read["docs/recipes.md"], read["docs/lora.md"]) > 10
    assert differences(texts) == []


@pytest.mark.parametrize(
    ("planted", "unit"),
    [
        ("The recipe `sd15-lora` takes 2.3 hours on a 3060.", "hour"),
        ("| recipe | hours on RTX 3060 |\n|---|---|\n| `sd15-lora` | 2.3 |", "hour"),
        ("Of `sdxl-lora`, training needs 9.7 GiB.", "GiB"),
    ],
)
def test_a_planted_difference_is_found(planted: str, unit: str) -> None:
    recipes = (ROOT / "docs/recipes.md").read_text("utf-8")
    (found,) = differences({"docs/recipes.md": recipes, "docs/lora.md": planted})
    assert unit in found and "docs/lora.md" in found
