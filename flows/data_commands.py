"""`kiln data`, and `kiln show` of a picture: what a recipe's newest runs did with pictures."""

from __future__ import annotations

import json
from pathlib import Path

from artifacts.store import Store
from configs.errors import Refused
from configs.settings.recipe import Recipe
from tasks.data_page import count_rows, counts, missing, write_page
from tasks.data_set import IMAGES, DataSet
from tasks.panels import aligned
from tasks.picture_story import tell


def data_of(recipe: Recipe, name: str) -> DataSet:
    """The data set of a recipe. Raises Refused if no run has downloaded it.

    Args:
        name: the recipe, as commands name it.
    """
    data = DataSet.newest(Store(recipe.store), recipe.name)
    if IMAGES not in data.artifacts:
        raise Refused(
            f"recipe {recipe.name}: {recipe.store} has no pictures of it: {missing(name, IMAGES)}"
        )
    return data


def show_data(recipe: Recipe, name: str, html: Path | None, *, as_json: bool) -> None:
    """Print the counts of pictures by stage and reason, and write the page.

    Args:
        name: the recipe, as commands name it.
        html: file of the page; None: no page is written.
    """
    data = data_of(recipe, name)
    by_stage = counts(recipe, data)
    if html is not None:
        html.write_text(write_page(recipe, name, data), encoding="utf-8")
    if as_json:
        keys = {stage: artifact.key for stage, artifact in data.artifacts.items()}
        page = None if html is None else str(html)
        print(json.dumps({"counts": by_stage, "artifacts": keys, "page": page}))
        return
    for line in aligned(count_rows(by_stage, name)):
        print(line)
    if html is not None:
        print(f"page: {html}")


def show_picture(recipe: Recipe, name: str, what: str, *, as_json: bool) -> None:
    """Print what each stage did with a picture, for each of its entries.

    Args:
        name: the recipe, as commands name it.
        what: URL, local file or sha256 of the picture as it was downloaded.
    """
    stories = tell(recipe, data_of(recipe, name), what)
    if as_json:
        print(json.dumps({"entries": [[told._asdict() for told in story] for story in stories]}))
        return
    for number, story in enumerate(stories):
        if number:
            print()
        for stage, text in story:
            print(f"{stage:9} {text}")
