"""`publish.promote: manual`: a model that passes awaits a person, and its run says so."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock
from urllib.parse import unquote

import pytest
from picture_server import picture
from prefect.exceptions import ObjectNotFound, ParameterTypeError
from reused_runs import commit, published_by, publishing, reused, run_of_digits

from artifacts.store import KeyParts
from configs.settings.recipe import Hub
from flows import finetune
from flows.decide import decide
from flows.run import Run
from flows.store_commands import show_history
from tasks.panels import Facts, Table, to_markdown
from tasks.publish import stage as publish
from tasks.publish.champion_alias import ChampionAlias
from tasks.publish.register import approve, register, show_candidate
from tasks.publish.registry import Registry, Version


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return publishing(run_of_digits(tmp_path), promote="manual", gate=())


def test_a_model_awaits_approval_and_is_announced_once(run: Run) -> None:
    results, registry = published_by(run), publish.registry_of(run.recipe)

    def registered() -> dict[str, Any]:
        return register(run.recipe, run.base, run.store, results, {})

    first = registered()
    assert first["status"] == "awaiting" and first["why"].startswith("v1 awaits approval until ")
    assert first["is_new"] and registry.champion() is None
    assert not registered()["is_new"]
    approve(registry, "candidate", "anna", "")
    again = registered()
    assert "candidate" not in again and not again["is_new"]
    assert again["champion"]["version"] == "v1"


@pytest.mark.parametrize("promote", ["manual", "auto"])
def test_a_run_of_a_rejected_model_says_by_whom(run: Run, promote: str) -> None:
    results, registry = published_by(run), publish.registry_of(run.recipe)
    register(run.recipe, run.base, run.store, results, {})
    registry.reject("candidate", "anna", "too thin")
    run = publishing(run, promote=promote)
    again = register(run.recipe, run.base, run.store, results, {})
    assert (again["status"], again["is_new"]) == ("rejected", False)
    assert again["why"] == "v1 was rejected by anna: too thin"
    assert registry.champion() is None


def test_an_expired_candidate_is_asked_for_by_the_next_run(run: Run) -> None:
    run = publishing(run, approval_days=1e-9)
    results = published_by(run)
    for _ in range(2):
        assert register(run.recipe, run.base, run.store, results, {})["is_new"]


def test_the_history_names_why_a_candidate_was_forced(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    registry = publish.registry_of(run.recipe)
    draft = run.store.draft(KeyParts("publish", 1, {"force": "a demonstration"}, {}))
    draft.write("report.html", b"")
    forced = reused(draft.commit({"forced": "a demonstration"}, {}))
    register(run.recipe, run.base, run.store, [*published_by(run)[:-1], forced], {})
    approve(registry, "candidate", "anna", "")
    show_history(registry.store.url, registry.name)
    assert "00:00, forced: a demonstration\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gate", "start", "bound"),
    [((), None, False), (("cmmd <= champion",), None, True), ((), "v1", True)],
)
def test_a_verdict_holds_for_one_champion_if_a_rule_or_the_training_has_it(
    run: Run, gate: tuple[str, ...], start: str | None, bound: bool
) -> None:
    run, registry = publishing(run, gate=gate), publish.registry_of(run.recipe)
    registry.promote(registry.publish(commit(run.store, "publish", 0, {})).name)
    registered = register(run.recipe, run.base, run.store, published_by(run), {}, start)
    assert registered["candidate"]["bound"] == bound
    assert registered["candidate"]["champion"] == "v1"


def test_promotion_is_no_content_of_a_model(run: Run) -> None:
    """A recipe that asks a person reuses the models that were published without one."""
    trained, evaluated = (commit(run.store, stage, 1, {}) for stage in ("train", "evaluate"))
    recipes = [publishing(run, promote=how, approval_days=3).recipe for how in ("auto", "manual")]
    stages = [publish.PublishStage(recipe, run.base, trained, evaluated) for recipe in recipes]
    assert len({stage.parts.key for stage in stages}) == 1


def test_a_candidate_is_pushed_to_the_hub_when_it_is_approved(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = publishing(run, hub=Hub(repo="someone/digits"))
    pushed: list[str] = []

    def push(registry: Registry, version: Version, repo: str, *, private: bool) -> str:
        pushed.append(f"{version.name} {repo} {private}")
        return "the commit"

    monkeypatch.setattr("tasks.publish.hub.push", push)
    register(run.recipe, run.base, run.store, published_by(run), {})
    assert not pushed
    approve(publish.registry_of(run.recipe), "v1", "anna", "")
    assert pushed == ["v1 someone/digits True"]


def test_an_approval_holds_although_the_alias_could_not_be_written(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A second approval would be refused, and nothing told of the first."""
    registry = publish.registry_of(run.recipe)
    register(run.recipe, run.base, run.store, published_by(run), {})
    monkeypatch.setattr(ChampionAlias, "follow", MagicMock(side_effect=OSError("disk")))
    assert approve(registry, "candidate", "anna", "").name == "v1"
    assert registry.history().champion == "v1" and "promote v1 again" in caplog.text


def test_a_decision_names_who_makes_it() -> None:
    with pytest.raises(ParameterTypeError, match="by: String should match"):
        decide.validate_parameters({"model": "digits", "decision": "promote", "by": " "})


@pytest.mark.slow
def test_the_task_ends_in_a_state_of_its_own_name(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = published_by(run)
    monkeypatch.setattr("tasks.build_or_reuse.build_or_reuse", lambda *_, **__: results[-1])
    state: Any = finetune.publish.fn(run, *results[:-1])
    assert state.is_completed() and state.name == "Awaiting approval"
    report = finetune.report_of([*results[:-1], state.result()])
    assert (report["status"], report["stages"].keys() >= {"publish"}) == ("awaiting", True)
    ended: Any = finetune.final_state(report, state)
    assert (ended.name, ended.message) == ("Awaiting approval", report["why"])


def candidate_with_files(run: Run) -> tuple[Registry, dict[str, Any]]:
    """A candidate v2 beside the champion v1, with the files that its page shows."""
    registry = publish.registry_of(run.recipe)
    verdict = {"rule": "cmmd <= champion", "passed": True, "value": 0.05, "bound": 0.06}
    values = {"value": 0.05, "n": 30, "ci": [0.04, 0.06]}
    compared = {"value": -0.01, "ci": [-0.02, -0.005]}
    measured = {
        "metrics": {"cmmd": {"base": values, "tuned": values, "champion": values}},
        "differences": {"cmmd": {"base": compared, "champion": compared}},
    }
    for n in (1, 2):
        draft = run.store.draft(KeyParts("publish", 1, {"n": n}, {}))
        draft.write("metrics.json", json.dumps(measured).encode())
        draft.write("gate.json", json.dumps([verdict]).encode())
        draft.write("before_after.png", picture(n))
        version = registry.publish(draft.commit({"forced": None}, {}))
        if n == 1:
            registry.promote(version.name)
    candidate, _ = registry.propose(version, 1.0, expected="v1", bound=True, hub=None)
    return registry, candidate


def test_the_page_has_what_a_person_decides_on(run: Run) -> None:
    registry, candidate = candidate_with_files(run)
    form = "/deployments/deployment/number/run?parameters=filled"
    panels = show_candidate(registry, candidate, form, ["caption", "encode"])
    titles = [panel.title for panel in panels]
    assert titles[:3] == ["Candidate", "Decide", "Commands"]
    tables = {panel.title: panel.rows for panel in panels if isinstance(panel, Table)}
    assert tables["Gate"][0]["verdict"] == "passed"
    (row,) = tables["Metrics and paired differences, with 95% confidence intervals"]
    assert {"base", "tuned", "champion", "tuned - champion"} <= row.keys()
    assert titles[4:6] == ["Before and after: base above, v2 below", "Base above, v1 below"]
    page = to_markdown("digits", panels)
    assert f"]({form})" in page and "/artifacts/key/digits-caption" in page
    registry.approve("v2", "anna", "clear strokes")
    decided, *rest = show_candidate(registry, candidate, None)
    assert isinstance(decided, Facts)
    assert decided.values["state"] == "v2 was promoted by anna: approved: clear strokes"
    assert not {"Decide", "Commands"} & {panel.title for panel in rest}


@pytest.mark.parametrize("is_deployed", [True, False])
def test_the_event_has_the_links_to_page_and_form(
    run: Run, is_deployed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, candidate = candidate_with_files(run)
    events: list[dict[str, Any]] = []

    def emit(event: str, **more: Any) -> object:
        events.append(more)
        return object()

    monkeypatch.setattr(finetune, "emit_event", emit)
    monkeypatch.setattr("flows.finetune.FlowRunContext.get", classmethod(lambda _: object()))

    class Client:
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def read_deployment_by_name(self, name: str) -> Any:
            if not is_deployed:
                raise ObjectNotFound(Exception())
            return type("Deployment", (), {"id": f"number-of-{name}"})

    monkeypatch.setattr(finetune, "get_client", lambda **_: Client())
    form = finetune._form(registry, "v2")
    facts = {"candidate": candidate, "model": registry.url("v2"), "metrics": {}}
    monkeypatch.setattr("flows.finetune.PREFECT_UI_URL.value", lambda: "http://ui.example")
    finetune.emit_awaiting("digits", facts, form)
    payload = events[0]["payload"]
    assert payload["page"] == "http://ui.example/artifacts/key/digits-model"
    if not is_deployed:
        assert form is None and payload["form"] == payload["page"]
        return
    place, _, filled = payload["form"].partition("?parameters=")
    assert place == "http://ui.example/deployments/deployment/number-of-decide/candidate/run"
    of_team = finetune._form(Registry(registry.store.url, "vision/digits"), "v2")
    assert of_team is not None and "/number-of-decide/candidate-vision/run?" in of_team
    given = {"model": "digits", "version": "v2", "registry": registry.store.url}
    assert json.loads(unquote(filled)) == given
    assert (payload["version"], payload["champion"]) == ("v2", "v1")


@pytest.mark.slow
def test_a_candidate_whose_champion_is_gone_is_measured_anew_and_approved(
    first: dict[str, Any], small: dict[str, Any], here: Callable[..., str], api: str
) -> None:
    store = str(small["store"])
    registry = Registry(f"{store}/registry", "digits")
    gate = {"publish.gate": ["clip_score >= champion * 0.1"]}
    manual = {**small, **gate, "publish.promote": "manual", "publish.license": "cc0-1.0"}

    def decision(version: str, decision: str = "promote") -> Any:
        given: Any = {"by": "anna", "reason": "seen", "registry": registry.store.url}
        return decide("digits", decision, version=version, **given, return_state=True)

    asked = "awaiting: {} awaits approval until"
    assert asked.format("v2") in here("run", "digits", overrides=manual, code=5, api=api)
    other = {**small, **gate, "train.learning_rate": 5e-4}
    assert "published: " in here("run", "digits", overrides=other, api=api)
    refused = decision("v2")
    assert refused.is_failed() and "the next run of its recipe measures it anew" in refused.message
    assert asked.format("v4") in here("run", "digits", overrides=manual, code=5, api=api)
    assert (promoted := decision("v4")).name == "Promoted"
    assert promoted.message == "v4 was promoted by anna: approved: seen"
    assert [move["version"] for move in registry.history().moves] == ["v1", "v3", "v4"]
    assert "published: " in here("run", "digits", overrides=manual, api=api)
