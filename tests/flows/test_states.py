"""The final states of tasks, and runs with `until`."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.states import Completed
from toy_recipes import base_of

from artifacts.gc import needed_by, runs
from artifacts.store import KeyParts, Store
from configs.load_recipe import load_recipe
from flows import finetune
from flows.run import Run, stages_until
from tasks.build_or_reuse import StageResult, build_or_reuse
from tasks.encode.stage import EncodeStage
from tasks.evaluate.inputs import MeasuringModels
from tasks.publish.promotion_gate import Verdict
from tasks.publish.stage import PublishStage, Rejected, VerdictStage, lineage_nodes


@pytest.fixture
def run(tmp_path: Path) -> Run:
    recipe = load_recipe("digits", {"store": str(tmp_path), "publish.name": "My_digits"})
    return Run(recipe, Store(recipe.store), base_of(recipe), MeasuringModels(tmp_path), "a-run")


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of artifacts in Prefect."""
    found: list[str] = []
    monkeypatch.setattr("tasks.build_or_reuse.show_in_prefect", lambda key, *_: found.append(key))
    return found


SUMMARY = {
    "samples": 1,
    "holdout": 0,
    "bad": {},
    "caption_tokens": {},
    "cut": {},
    "copies_left_out": 0,
}  # of an encode stage without faults


def result(store: Store, stage: str, outcome: str = "built") -> StageResult:
    artifact = store.draft(KeyParts(stage, 1, {}, {})).commit(SUMMARY, {})
    return StageResult(stage, artifact.key, artifact.uri, artifact.digest, outcome, 0.0)


@pytest.mark.parametrize(("outcome", "name"), [("built", "Completed"), ("reused", "Reused")])
def test_the_final_state_of_a_task_names_the_outcome(
    run: Run, keys: list[str], monkeypatch: pytest.MonkeyPatch, outcome: str, name: str
) -> None:
    made = result(run.store, "encode", outcome)
    monkeypatch.setattr(EncodeStage, "parts", KeyParts("encode", 1, {}, {}))
    monkeypatch.setattr("tasks.build_or_reuse.build_or_reuse", lambda *_, **__: made)
    state: Any = finetune.encode.fn(run, result(run.store, "download"))
    assert state.is_completed() and state.name == name
    assert state.result() == made
    assert keys == ["my-digits-encode"]


def test_a_flow_whose_model_is_rejected_ends_with_that_name() -> None:
    last = Completed(message="cmmd < base")
    state = finetune.final_state({"status": "rejected"}, last)
    assert (state.name, state.message) == ("Rejected", "cmmd < base")
    assert finetune.final_state({"status": "published"}, last) == {"status": "published"}


def test_a_rejected_model_is_an_outcome_with_its_verdicts(
    run: Run, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = {"cmmd": {"base": {"value": 1.0}, "tuned": {"value": 2.0}}}

    def refuse(store: Store, parts: KeyParts, build: Any, **more: Any) -> StageResult:
        if parts.stage == "publish":
            failed = Verdict("cmmd < base", False, 2.0, 1.0)
            raise Rejected([failed], {"metrics": numbers}, "v1")
        return build_or_reuse(store, parts, build, **more)

    before = [result(run.store, stage) for stage in run.recipe.stages[:-1]]
    inputs = {"model": before[2].digest, "evaluation": before[3].digest}
    parts = KeyParts("publish", 1, {}, inputs)
    monkeypatch.setattr(PublishStage, "parts", parts)
    monkeypatch.setattr(finetune.publication, "lineage_of", lambda *_: {})
    monkeypatch.setattr("tasks.build_or_reuse.build_or_reuse", refuse)
    state: Any = finetune.publish.fn(run, *before)
    assert state.is_completed() and state.name == "Rejected"
    assert "cmmd < base (measured 2, bound 1)" in state.message
    (failed,) = state.result().facts["gate"]
    assert (failed["rule"], failed["passed"]) == ("cmmd < base", False)
    assert keys == ["my-digits-publish"]
    stored = run.store.load("verdict", state.result().facts["verdict"]["key"])
    assert stored is not None and json.loads(stored.read("metrics.json"))["metrics"] == numbers
    assert json.loads(stored.read("gate.json")) == [failed]
    assert stored.summary == {
        "status": "rejected",
        "failed": ["cmmd < base"],
        "compared_with": "v1",
    }
    used = needed_by(run.store, *(one.keys for one in runs(run.store)))
    assert ("verdict", stored.key) in used, "`kiln gc` keeps it and what it judges"
    assert {(one.stage, one.key) for one in before[2:]} <= used.keys()
    lineage = [node.title for node in lineage_nodes(stored).values()]
    assert lineage == ["evaluate", "train", "verdict"]


def test_another_reason_to_reject_is_another_verdict() -> None:
    parts = KeyParts("publish", 1, {"name": "digits"}, {"model": "m"})
    publication: Any = SimpleNamespace(parts=parts)
    passed, failed = Verdict("cmmd < base", True, 1.0, 2.0), Verdict("cmmd < base", False, 2.0, 2.0)
    out_of_memory = Verdict("smoke test", False, None, None, "out of memory")
    rejections = [
        Rejected([failed]),
        Rejected([passed, out_of_memory]),
        Rejected([failed], {"a": 1}),
    ]
    keys = {VerdictStage(publication, one).parts.key for one in rejections}
    assert len(keys) == 3
    assert VerdictStage(publication, Rejected([failed])).parts.key in keys


@pytest.mark.parametrize("until", load_recipe("digits").stages)
def test_a_run_ends_after_its_last_stage(
    run: Run, monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    begun: list[str] = []

    def stages(run: Run) -> Iterator[Any]:
        for stage in run.recipe.stages:
            begun.append(stage)
            facts = {"model": "v1"} if stage == "publish" else {}
            yield Completed(data=StageResult(stage, "", "", "", "built", 0.0, facts))

    monkeypatch.setattr(finetune, "prepare", lambda *_, **__: run)
    monkeypatch.setattr(finetune.flow_process, "prepare_process", lambda: None)
    monkeypatch.setattr(finetune, "stages_of", stages)
    report = finetune.finetune.fn("digits", {}, until)
    assert begun == list(report["stages"]) == list(stages_until(run.recipe, until))
    assert report["status"] == ("published" if until == "publish" else "built")


def test_three_functions_lie_between_the_flow_and_a_stages_build(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: Any, **__: Any) -> dict[str, Any]:
        raise RuntimeError("here")

    monkeypatch.setattr(EncodeStage, "parts", KeyParts("encode", 1, {}, {}))
    monkeypatch.setattr(EncodeStage, "build", build)
    with pytest.raises(RuntimeError, match="here") as error:
        finetune.encode.fn(run, result(run.store, "download"))
    ours = (frame for frame in error.traceback if frame.frame.f_globals["__name__"] != "contextlib")
    _, *passed, last = (frame.name for frame in ours)
    assert (passed, last) == (["encode", "build", "build_or_reuse"], "build")
