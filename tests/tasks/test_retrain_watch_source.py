"""A source has changed if the stamp of one of its files has."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.load_and_extend_recipe import load_recipe
from configs.settings.recipe import Recipe
from flows import watch_source as flow
from flows.retrain import one_at_a_time
from tasks.retrain import watch_source
from tasks.retrain.watch_source import is_retraining, last_stamp, remember, stamp

pytestmark = pytest.mark.slow


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


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The stamps of the emitted events."""
    found: list[str] = []

    def emit(event: str, resource: Any, payload: dict[str, str]) -> object:
        found.append(payload["stamp"])
        return object()

    monkeypatch.setattr(flow, "emit_event", emit)
    monkeypatch.setattr(flow, "log_to_prefect", lambda: None)
    yield found


@pytest.mark.extended
def test_a_change_during_a_retraining_is_announced_after_it(
    tmp_path: Path, emitted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deployment cancels a run beside another one, so an event meanwhile would be lost."""

    def watch(count: int) -> dict[str, Any]:
        given = {"store": str(tmp_path / "store"), "source.count": count}
        found: Any = flow.watch_source.fn("digits", given)
        report: dict[str, Any] = found if isinstance(found, dict) else found.data
        return report

    recipe = recipe_of(tmp_path, {"kind": "digits"})
    assert watch(60)["changed"] and not watch(60)["changed"] and len(emitted) == 1
    with one_at_a_time(recipe):
        assert not watch(60)["waits"], "nothing has changed"
        for _ in range(2):
            assert (watch(90)["changed"], watch(90)["waits"]) == (False, True)
    assert watch(90)["waits"], "the server may still count the run that has ended"
    monkeypatch.setattr(watch_source, "SETTLING", 0.0)
    assert watch(90)["changed"] and not watch(90)["changed"]
    assert len(set(emitted)) == len(emitted) == 2


def test_a_retraining_that_was_killed_delays_no_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_source, "SETTLING", 0.0)
    recipe = recipe_of(tmp_path, {"kind": "digits"})
    assert not is_retraining(recipe), "there is no registry yet"
    script = f"""
import os
from configs.load_and_extend_recipe import load_recipe
from flows.retrain import one_at_a_time
with one_at_a_time(load_recipe("digits", {{"store": {recipe.store!r}}})):
    os._exit(0)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert not is_retraining(recipe)
