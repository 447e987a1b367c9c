"""The final states of tasks, and runs with `until`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.states import Completed

from artifacts.artifact_key import KeyParts
from artifacts.store import Store
from configs.load_recipe import load_recipe
from configs.recipe import STAGES
from flows import finetune
from flows.preflight import Run
from tasks.build_or_reuse import StageResult
from tasks.publish.gate import Verdict
from tasks.publish.stage import Rejected


@pytest.fixture
def run(tmp_path: Path) -> Run:
    recipe = load_recipe("digits", {"store": str(tmp_path), "publish.name": "My_digits"})
    return Run(recipe, Store(recipe.store), tmp_path, None, tmp_path, "a-run")


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of artifacts in Prefect."""
    found: list[str] = []
    monkeypatch.setattr("flows.task_states.show_in_prefect", lambda key, *_: found.append(key))
    return found


def result(store: Store, stage: str, outcome: str = "built") -> StageResult:
    artifact = store.draft(KeyParts(stage, 1, {}, {})).commit({}, {})
    return StageResult(stage, artifact.key, artifact.uri, artifact.digest, outcome, 0.0)


@pytest.mark.parametrize(("outcome", "name"), [("built", "Completed"), ("reused", "Reused")])
def test_the_final_state_of_a_task_names_the_outcome(
    run: Run, keys: list[str], monkeypatch: pytest.MonkeyPatch, outcome: str, name: str
) -> None:
    made = result(run.store, "encode", outcome)
    monkeypatch.setattr("tasks.encode.stage.key_parts", lambda *_: KeyParts("encode", 1, {}, {}))
    monkeypatch.setattr(finetune, "build_or_reuse", lambda *_, **__: made)
    state: Any = finetune.encode.fn(run, result(run.store, "download"))
    assert state.is_completed() and state.name == name
    assert state.result() is made
    assert keys == ["my-digits-encode"]


def test_a_rejected_model_is_an_outcome_with_its_verdicts(
    run: Run, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> StageResult:
        raise Rejected([Verdict("cmmd < base", False, 2.0, 1.0)])

    parts = KeyParts("publish", 1, {}, {})
    monkeypatch.setattr("tasks.publish.stage.key_parts", lambda *_: parts)
    monkeypatch.setattr("tasks.publish.stage.lineage_of", lambda *_: {})
    monkeypatch.setattr(finetune, "build_or_reuse", refuse)
    before = (result(run.store, stage) for stage in STAGES[:-1])
    state: Any = finetune.publish.fn(run, *before)
    assert state.is_completed() and state.name == "Rejected"
    assert "cmmd < base (measured 2, bound 1)" in state.message
    (verdict,) = state.result().facts["gate"]
    assert (verdict["rule"], verdict["passed"]) == ("cmmd < base", False)
    assert keys == ["my-digits-publish"]


@pytest.mark.parametrize("until", STAGES)
def test_a_run_ends_after_its_last_stage(
    run: Run, monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    begun: list[str] = []

    def stages(run: Run) -> Iterator[Any]:
        for stage in STAGES:
            begun.append(stage)
            facts = {"model": "v1"} if stage == "publish" else {}
            yield Completed(data=StageResult(stage, "", "", "", "built", 0.0, facts))

    monkeypatch.setattr(finetune, "prepare", lambda *_, **__: run)
    monkeypatch.setattr(finetune, "log_to_prefect", lambda: None)
    monkeypatch.setattr(finetune, "stages_of", stages)
    report = finetune.finetune.fn("digits", {}, until)
    assert begun == list(report["stages"]) == list(STAGES[: 1 + STAGES.index(until)])
    assert report["status"] == ("published" if until == "publish" else "built")


def test_two_functions_lie_between_the_flow_and_a_stages_build(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: Any, **__: Any) -> dict[str, Any]:
        raise RuntimeError("here")

    monkeypatch.setattr("tasks.encode.stage.key_parts", lambda *_: KeyParts("encode", 1, {}, {}))
    monkeypatch.setattr("tasks.encode.stage.build", build)
    with pytest.raises(RuntimeError, match="here") as error:
        finetune.encode.fn(run, result(run.store, "download"))
    ours = (frame for frame in error.traceback if frame.frame.f_globals["__name__"] != "contextlib")
    _, *passed, last = (frame.name for frame in ours)
    assert (passed, last) == (["encode", "build_or_reuse"], "build")
