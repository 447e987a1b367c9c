"""A run whose artifacts exist does as much in a store of many artifacts as in one of few."""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from full_store import fill

from artifacts.store import Store
from configs.load_recipe import load_recipe
from configs.settings.recipe import STAGES
from flows import finetune
from flows.run import prepare
from tasks.panels import Panel, to_markdown

pytestmark = pytest.mark.soak
#: Audit events of Python with a path: reads, writes and listings.
EVENTS = {"open", "os.listdir", "os.scandir", "os.remove", "os.rename", "os.link", "os.mkdir"}
_watching: list[Callable[[str, str], None]] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event in EVENTS and isinstance(arguments[0], str | os.PathLike):
        _watching[-1](event, os.fspath(arguments[0]))


sys.addaudithook(_hook)  # it cannot be removed


@contextmanager
def operations(root: Path) -> Iterator[Counter[str]]:
    """Counts of operations below a folder by kind, and of the entries of each listed folder.

    Entries of the model's own folder do not count: on local disks a lock and the history of
    champions are found by listing the names there, one for each version.
    """
    found: Counter[str] = Counter()

    def watch(event: str, path: str) -> None:
        if path.startswith(str(root)):
            found[event] += 1
            if event in ("os.listdir", "os.scandir") and not path.endswith("/registry/digits"):
                _watching.append(lambda *_: None)  # ours does not count
                found[f"entries of {os.path.relpath(path, root)}"] += (
                    len(os.listdir(path)) if os.path.isdir(path) else 0
                )
                _watching.pop()

    _watching.append(watch)
    try:
        yield found
    finally:
        _watching.remove(watch)


def reuse_all(overrides: dict[str, Any]) -> None:
    """Run every stage as the flow does, and write the text of each artifact in Prefect."""
    run = prepare(load_recipe("digits", overrides))
    for state in finetune.stages_of(run):
        assert state.result().outcome == "reused"


def test_a_cached_flows_operations_do_not_grow_with_the_store(
    first: dict[str, Any], small: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def show(key: str, heading: str, panels: Callable[[], list[Panel]]) -> None:
        assert to_markdown(heading, panels())

    for module in ("tasks.build_or_reuse", "flows.finetune"):
        monkeypatch.setattr(f"{module}.show_in_prefect", show)
    for stage in STAGES:  # without Prefect's engine, which reads and writes elsewhere
        task = getattr(finetune, stage)
        monkeypatch.setattr(
            finetune, stage, lambda run, *before, task=task: task.fn(run, *map(result_of, before))
        )
    monkeypatch.setattr(finetune, "run_task", lambda task, *given: task(*given))
    store = Path(small["store"])
    reuse_all(small)  # its first time in this process stages models
    counts = []
    for artifacts in (20, 400):
        fill(store, artifacts)
        assert len(list(Store(str(store)).artifacts())) == artifacts
        with operations(store) as found:
            reuse_all(small)
        counts.append(found)
    assert counts[0]["open"] > 10, "the operations are seen"
    assert counts[1] == counts[0]


def result_of(state: Any) -> Any:
    """A task's result, as Prefect gives it to the next task."""
    return state.result()
