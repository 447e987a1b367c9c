"""Registration: which model becomes the champion, and what happens after its promotion."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from reused_runs import commit, published_by, publishing, reused, run_of_digits

from artifacts.compare_and_swap import swap
from artifacts.store import Artifact, Store
from configs.errors import Away, Failed
from configs.settings.recipe import STAGES, Hub
from flows import finetune
from flows.run import Run, Sent
from tasks.build_or_reuse import StageResult
from tasks.publish import stage as publish
from tasks.publish.champion_alias import AliasNotWritten, ChampionAlias
from tasks.publish.register import register
from tasks.publish.registry import Registry, Version


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return run_of_digits(tmp_path)


@pytest.mark.parametrize("compared_with", ["first", "second"])
def test_only_a_model_compared_with_the_champion_replaces_it(run: Run, compared_with: str) -> None:
    store, registry = run.store, publish.registry_of(run.recipe)
    champions = {
        name: registry.publish(commit(store, "publish", number, {}))
        for number, name in enumerate(("first", "second"))
    }
    registry.promote(champions["second"].name)
    before = [commit(store, s, 1, {}) for s in ("download", "encode", "train", "evaluate")]
    given = publish.PublishStage(run.recipe, run.base, before[2], before[3]).inputs
    assert given["champion"] == champions["second"].manifest["digest"]
    theirs = {**given, "champion": champions[compared_with].manifest["digest"]}
    published = commit(store, "publish", 9, theirs)
    store.fs.pipe_file(f"{published.path}/report.html", b"")
    results = [reused(artifact) for artifact in (*before, published)]
    if compared_with == "first":
        with pytest.raises(Away, match="another model became the champion meanwhile"):
            register(run.recipe, run.base, store, results, {})
    else:
        register(run.recipe, run.base, store, results, {})
    champion = registry.champion()
    assert champion is not None
    assert champion.name == ("v2" if compared_with == "first" else "v3")


def test_the_champion_is_measured_where_the_new_model_is(run: Run) -> None:
    store, registry = run.store, publish.registry_of(run.recipe)
    registry.promote(registry.publish(commit(store, "publish", 0, {})).name)
    trained, evaluated = (commit(store, stage, 1, {}) for stage in ("train", "evaluate"))

    def measures(run: Run, **settings: Any) -> bool:
        return publishing(run, **settings).champion_to_measure(trained, evaluated) is not None

    assert measures(run)
    assert not measures(run, gate=["clip_score > base"]), "no rule names it"
    assert not measures(replace(run, stages=STAGES[:4])), "nothing is published"
    on_pool = replace(run, stages=("evaluate",))
    assert not measures(replace(on_pool, sent=Sent("evaluate", evaluated.key, {})))
    assert measures(replace(on_pool, sent=Sent("evaluate", "the champion's key", {})))
    store.draft(publish.PublishStage(run.recipe, run.base, trained, evaluated).parts).commit({}, {})
    assert not measures(run), "the model is published"


def test_a_champion_that_changes_while_a_pool_measures_it_is_no_failure(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, registry = run.store, publish.registry_of(run.recipe)
    for n in (0, 1):
        registry.publish(commit(store, "publish", n, {}))
    registry.promote("v1")
    trained, evaluated = (commit(store, stage, 1, {}) for stage in ("train", "evaluate"))

    def measured(*_: Any) -> Any:
        def call(_: str) -> None:
            registry.promote("v2")
            raise Failed("the sender expects another key")

        return call

    stage: Any = SimpleNamespace(trained=trained, data=None)
    monkeypatch.setattr(Run, "champion_metrics", measured)
    for expected in (Away, Failed):  # the second time it stays the champion
        with pytest.raises(expected):
            finetune._measure_champion(publishing(run), stage, evaluated, ())


def test_a_champion_that_comes_between_the_comparison_and_the_promotion_stays(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, registry = run.store, publish.registry_of(run.recipe)
    first, other = (registry.publish(commit(store, "publish", n, {})) for n in (0, 1))
    registry.promote(first.name)
    before = [commit(store, s, 1, {}) for s in ("download", "encode", "train", "evaluate")]
    given = publish.PublishStage(run.recipe, run.base, before[2], before[3]).inputs
    published = commit(store, "publish", 9, given)
    store.fs.pipe_file(f"{published.path}/report.html", b"")
    compare = publish.PublishStage.inputs_of

    def compared(*given: Any) -> dict[str, str]:
        found = compare(*given)
        registry.promote(other.name)
        return found

    monkeypatch.setattr(publish.PublishStage, "inputs_of", compared)
    results = [reused(artifact) for artifact in (*before, published)]
    with pytest.raises(Away, match="the champion is v2, not v1: run again"):
        register(run.recipe, run.base, store, results, {})
    assert [move["version"] for move in registry.history().moves] == ["v1", "v2"]


@pytest.mark.slow
def test_an_error_of_the_report_or_after_the_promotion_is_a_warning(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, registry = run.store, publish.registry_of(run.recipe)
    before = [
        commit(store, stage, 1, {"source": "s", "base": "b"})
        for stage in ("download", "encode", "train", "evaluate")
    ]
    parts = publish.PublishStage(run.recipe, run.base, before[2], before[3]).parts
    published = commit(store, "publish", 9, parts.inputs)
    result = replace(reused(published), outcome="built")
    load = StageResult.load

    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("an odd picture")

    def load_before(self: StageResult, store: Store) -> Artifact:
        return load(self, store) if registry.champion() is None else broken()

    monkeypatch.setattr("tasks.build_or_reuse.build_or_reuse", lambda *_, **__: result)
    monkeypatch.setattr(finetune, "SHOWS", dict.fromkeys(finetune.SHOWS, broken))
    monkeypatch.setattr(StageResult, "load", load_before)
    monkeypatch.setattr(publish.Registry, "last_move", broken)
    monkeypatch.setattr("prefect.context.FlowRunContext.get", lambda: object())
    monkeypatch.setattr("prefect.artifacts.create_markdown_artifact", broken)
    caplog.set_level("WARNING", "kiln")
    state: Any = finetune.publish.fn(run, *map(reused, before))
    assert state.is_completed()
    champion = registry.champion()
    assert champion is not None and state.data.facts["model"] == champion.uri
    page = (Path(champion.uri) / "report.html").read_text(encoding="utf-8")
    stages = len(run.recipe.stages)
    assert page.count("an odd picture") == stages
    warned = [record.getMessage() for record in caplog.records]
    assert len([line for line in warned if "report.html" in line]) == stages
    assert any("the champion is not shown" in line for line in warned)

    monkeypatch.setattr("tasks.publish.register.page", broken)
    store.fs.rm_file(f"{published.path}/report.html")
    monkeypatch.setattr(StageResult, "load", load)
    assert finetune.publish.fn(run, *map(reused, before)).is_completed()
    assert "report.html is missing" in caplog.text


@pytest.mark.parametrize("is_rejected", [False, True])
def test_a_run_reports_the_champion_that_its_model_was_compared_with(
    run: Run, is_rejected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation, which the report also has, knows no champion."""
    *before, _ = published_by(run)
    models = {"tuned": {"value": 1.0}, "champion": {"value": 2.0}}
    measured: Any = {"metrics": {"cmmd": models}, "differences": {"cmmd": {"champion": {}}}}
    trained, evaluated = (result.load(run.store) for result in before[2:])
    inputs = publish.PublishStage(run.recipe, run.base, trained, evaluated).inputs
    made = commit(run.store, "publish", 10, inputs, fingerprint="f", **measured)
    run.store.fs.pipe_file(f"{made.path}/report.html", b"")
    built = 0

    def judge(*_: Any, **__: Any) -> StageResult:
        nonlocal built
        built += 1
        if is_rejected and built == 1:
            raise publish.Rejected([], {**measured, "fingerprint": "f"})
        return reused(made)

    monkeypatch.setattr("tasks.build_or_reuse.build_or_reuse", judge)
    state: Any = finetune.publish.fn(run, *before)
    assert state.data.outcome == ("rejected" if is_rejected else "reused")
    assert {name: state.data.facts[name] for name in measured} == measured
    assert "fingerprint" not in state.data.facts


def test_a_failed_push_is_a_warning_with_the_command_that_repeats_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = publishing(run, hub=Hub(repo="someone/digits"))

    def push(registry: Registry, version: Version, repo: str, *, private: bool) -> str:
        assert (registry.champion(), private) == (version, True), "after the promotion"
        raise Failed("the hub refused someone/digits")

    monkeypatch.setattr("tasks.publish.hub.push", push)
    registered = register(run.recipe, run.base, run.store, published_by(run), {})
    assert registered["champion"]["version"] == "v1" and registered["hub"] is None
    registry = publish.registry_of(run.recipe).store.url
    assert f"kiln push digits@v1 someone/digits --registry {registry}" in caplog.text


def test_a_registry_that_is_away_after_the_promotion_fails_no_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = publishing(run, hub=Hub(repo="someone/digits"), keep_versions=1)
    promote = Registry.promote

    def away(*_: Any, **__: Any) -> Any:
        raise OSError("no route to host")

    def promote_and_lose(self: Registry, *given: Any, **more: Any) -> Version:
        promoted = promote(self, *given, **more)
        for name in ("champion", "last_move", "keep"):
            monkeypatch.setattr(Registry, name, away)
        return promoted

    with monkeypatch.context() as patch:
        patch.setattr(Registry, "promote", promote_and_lose)
        registered = register(run.recipe, run.base, run.store, published_by(run), {})
    assert registered["model"].endswith("/v1") and registered["hub"] is None
    assert caplog.text.count("no route to host") == 3
    assert "kiln push digits@v1 someone/digits" in caplog.text


def test_an_alias_that_cannot_follow_the_champion_fails_no_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The attempt after a failed one would find the champion, and announce nothing."""

    def away(alias: ChampionAlias) -> None:
        raise OSError("no route to host")

    with monkeypatch.context() as patch:
        patch.setattr(ChampionAlias, "follow", away)
        results = published_by(run)
        registered = register(run.recipe, run.base, run.store, results, {})
        assert registered["is_new"] and registered["champion"]["version"] == "v1"
        assert "no route to host" in caplog.text and "promote v1 again" in caplog.text
        with pytest.raises(AliasNotWritten, match="v1 is the champion, but"):
            publish.registry_of(run.recipe).promote("v1")  # as `kiln promote`: an error
    registry = publish.registry_of(run.recipe)
    assert registry.alias.target() is None
    assert not register(run.recipe, run.base, run.store, results, {})["is_new"]
    assert registry.alias.target() == "v1"


@pytest.mark.parametrize("is_made", [False, True])
def test_a_promotion_is_announced_although_the_store_raised(
    run: Run, is_made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once if only the answer was lost, else by the next attempt."""
    results = published_by(run)

    def lost(*request: Any) -> Any:
        if is_made:
            swap(*request)
        raise OSError("connection reset")

    with monkeypatch.context() as patch:
        patch.setattr("tasks.publish.champion_alias.swap", lost)
        patch.setattr(ChampionAlias, "follow", lambda alias: None)
        with nullcontext() if is_made else pytest.raises(OSError, match="connection reset"):
            registered = register(run.recipe, run.base, run.store, results, {})
    if not is_made:
        registered = register(run.recipe, run.base, run.store, results, {})
    assert registered["is_new"] and registered["champion"]["version"] == "v1"
    assert len(publish.registry_of(run.recipe).history().moves) == 1


def test_a_model_that_cannot_be_signed_is_no_champion(run: Run, tmp_path: Path) -> None:
    run = publishing(run, signing_key=str(tmp_path / "none.pem"))
    with pytest.raises(Failed, match=r"signing key .*none\.pem"):
        register(run.recipe, run.base, run.store, published_by(run), {})
    assert publish.registry_of(run.recipe).champion() is None


def test_old_versions_are_deleted_after_the_promotion(run: Run) -> None:
    run = publishing(run, keep_versions=1, gate=())
    for number in (7, 8, 9):
        register(run.recipe, run.base, run.store, published_by(run, number), {})
    registry = publish.registry_of(run.recipe)
    assert [version.name for version in registry.versions()] == ["v2", "v3"]
    registry.rollback()
    register(run.recipe, run.base, run.store, published_by(run, 10), {})
    assert [version.name for version in registry.versions()] == ["v2", "v4"]


def test_a_version_that_another_run_deleted_before_its_promotion_is_copied_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, results = publishing(run, gate=()), published_by(run)
    registry = publish.registry_of(run.recipe)

    def delete(*_: Any) -> None:
        registry.publish(commit(run.store, "publish", 10, {}))
        assert registry.keep(1) == ["v1"]

    with monkeypatch.context() as patch:
        patch.setattr(publish.PublishStage, "check_champion", delete)
        with pytest.raises(Away, match=r"v1: no such version .* run again"):
            register(run.recipe, run.base, run.store, results, {})
    assert registry.champion() is None
    registered = register(run.recipe, run.base, run.store, results, {})
    assert registered["is_new"] and registered["champion"]["version"] == "v3"
    assert [version.name for version in registry.versions()] == ["v2", "v3"]
