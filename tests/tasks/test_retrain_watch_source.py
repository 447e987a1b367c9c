"""A source has changed if the stamp of one of its files has."""

import os
from pathlib import Path
from typing import Any

import pytest

from configs.load_recipe import load_recipe
from configs.recipe import Recipe
from tasks.retrain.watch_source import last_stamp, remember, stamp


def recipe_of(tmp_path: Path, source: dict[str, Any]) -> Recipe:
    return load_recipe("digits", {"store": str(tmp_path / "store"), "source": source})


@pytest.mark.parametrize(
    "source",
    [
        {"kind": "urls", "format": "csv", "path": "lists"},
        {"kind": "folder", "path": "pictures"},
        {"kind": "folder", "path": "listed"},
    ],
)
def test_a_stamp_changes_with_a_file_of_the_source(tmp_path: Path, source: dict[str, Any]) -> None:
    names = {
        "lists": ["a.csv", "b.csv"],
        "pictures": ["a.png", "a.txt"],
        "listed": ["metadata.jsonl"],
    }
    folder = tmp_path / source["path"]
    folder.mkdir()
    files = [folder / name for name in names[source["path"]]]
    for file in files:
        file.write_text("url,caption\n")
    recipe = recipe_of(tmp_path, {**source, "path": str(folder)})
    found = [stamp(recipe), stamp(recipe)]
    for file in files:
        os.utime(file, (1, 1))  # another time, the same size
        found.append(stamp(recipe))
    assert found[0] == found[1] and len(set(found[1:])) == 1 + len(files)


def test_other_settings_of_a_source_are_another_stamp(tmp_path: Path) -> None:
    stamps = {stamp(recipe_of(tmp_path, {"kind": "digits", "count": n})) for n in (60, 90)}
    assert len(stamps) == 2


def test_a_stamp_is_remembered_in_the_registry(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, {"kind": "digits"})
    assert last_stamp(recipe) is None
    for found in ("one", "two"):
        remember(recipe, found)
        assert last_stamp(recipe) == found


def test_a_damaged_stamp_is_a_change(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, {"kind": "digits"})
    remember(recipe, "one")
    (file,) = Path(recipe.store).glob("registry/*/watched.json.*")
    for data in (b'{"stamp', b"[]", b"{}", b"\xff"):
        file.write_bytes(data)
        assert last_stamp(recipe) is None
    remember(recipe, "two")
    assert last_stamp(recipe) == "two"
