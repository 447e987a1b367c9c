"""The champion of a retraining: its artifacts, its comparison set, and the decisions about it."""

import hashlib
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from toy_recipes import base_of
from waiting import wait_until

from artifacts.store import Artifact, KeyParts, Store
from configs.errors import Away, Failed, Refused
from configs.load_recipe import load_recipe
from configs.settings.recipe import STAGES, Recipe
from flows import finetune
from flows import retrain as flow
from flows.retrain import one_at_a_time
from flows.run import Run
from flows.store_commands import collect_garbage
from tasks.build_or_reuse import StageResult, build_or_reuse
from tasks.encode.crop_to_bucket import settings_for_key
from tasks.evaluate.inputs import MeasuringModels
from tasks.publish import stage as publish
from tasks.publish.register import register
from tasks.retrain import decision
from tasks.retrain.champion import check_start_is_champion, find_champion
from tasks.retrain.decision import DecisionStage
from tasks.retrain.selection import Changes
from tasks.train import TrainStage

pytestmark = pytest.mark.slow

CHANGES = Changes("source", rows=90, new_rows=30)
MODELS = {"base": "the base", "clip": "the CLIP"}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    recipe = load_recipe("digits", {"store": str(tmp_path / "store"), "publish.gate": []})
    base = base_of(recipe)
    measuring = MeasuringModels(base.folder / "evaluator")
    return Run(recipe, Store(recipe.store), base, measuring, "a-run")


def commit(run: Run, stage: str, name: str, **parents: Artifact) -> Artifact:
    """An artifact with the recipe's settings of its stage; images `a of b` have b's pictures."""
    settings = {"encode": settings_for_key(run.recipe)}.get(stage, {})
    inputs = {name: artifact.digest for name, artifact in parents.items()}
    parts = KeyParts(stage, 1, settings, {"name": name, **inputs})

    def build(draft: Any) -> dict[str, Any]:
        draft.write("content", name.encode())
        if stage == "download":
            tar = Path(run.store.root).with_name(f"{name}.tar")
            tar.write_bytes(name.encode())
            key = hashlib.sha256(name.encode()).hexdigest()
            facts = {"hashes": [name.rpartition(" of ")[2]]}
            draft.add_shard(run.store.commit_shard(stage, key, {".tar": str(tar)}, facts))
        return {"forced": None} if stage == "publish" else {}

    return build_or_reuse(run.store, parts, build, parents=parents).load(run.store)


def result_of(artifact: Artifact) -> StageResult:
    return StageResult(artifact.stage, artifact.key, artifact.uri, artifact.digest, "reused", 0.0)


def publish_model(
    run: Run, name: str, start: dict[str, Artifact] | None = None
) -> dict[str, Artifact]:
    """The artifacts of a model that becomes the champion; `start`: those of the model before."""
    images = commit(run, "download", name)
    latents = commit(run, "encode", name, images=images)
    selected, compared = latents, {"images": images, "latents": latents}
    if start is not None:
        selected = commit(run, "encode", f"{name} and replay", latents=latents)
        compared = {"images": start["images"], "latents": start["latents"]}
    trained = commit(run, "train", name, latents=selected)
    evaluated = commit(run, "evaluate", name, **compared, model=trained)
    made = commit(run, "publish", name, model=trained, evaluation=evaluated)
    registry = publish.registry_of(run.recipe)
    registry.promote(registry.publish(made).name)
    return {"images": images, "latents": latents, "train": trained, "evaluate": evaluated}


def test_a_champion_is_found_with_all_its_rows_and_its_comparison_set(run: Run) -> None:
    assert find_champion(publish.registry_of(run.recipe), run.store) is None
    first = publish_model(run, "first")
    second = publish_model(run, "second", start=first)
    champion = find_champion(publish.registry_of(run.recipe), run.store)
    assert champion is not None and champion.version == "v2"
    assert champion.images == second["images"].key and champion.latents == second["latents"].key
    assert champion.trained == second["train"].key
    images, latents = commit(run, "download", "grown"), commit(run, "encode", "grown")
    given = replace(run, champion=champion).eval_inputs(images, latents)
    assert (given.images, given.latents) == (first["images"], first["latents"])
    assert given.training.images == images  # copies are searched among all pictures
    assert given.training_latents == latents  # which name those that are not trained on
    assert given.digests()["training_images"] == images.digest
    assert run.eval_inputs(images, latents).images == images
    encoded = replace(latents, manifest=latents.manifest | {"inputs": {"encoders": "others"}})
    others = replace(run, champion=champion).eval_inputs(images, encoded)
    assert others.latents == encoded  # the champion's latents are of another VAE
    for setting, reference in (
        ({"leave_out_copies": False}, first["images"]),
        ({"holdout": 0.5}, images),  # the champion is measured again
    ):
        encode = run.recipe.encode.model_copy(update=setting)
        changed = replace(run, recipe=run.recipe.model_copy(update={"encode": encode}))
        other = replace(changed, champion=champion)
        assert other.eval_inputs(images, latents).images == reference


def test_gc_keeps_what_a_champion_in_a_moved_registry_was_made_of(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weeks without a new row publish nothing, which would tell the store of the registry."""
    made = publish_model(run, "first")
    Path(run.store.root, "registry").rename(tmp_path / "moved")
    monkeypatch.setattr(flow, "plan_changes", lambda *_: (None, replace(CHANGES, new_rows=0)))
    monkeypatch.setattr(flow.download_stage, "plan", lambda *_: None)
    given = {"store": run.recipe.store, "publish.registry": str(tmp_path / "moved")}
    found = flow.compare.fn(replace(run, recipe=load_recipe("digits", given)))
    assert found.unchanged == "the source has no new rows since v1"
    collect_garbage(run.store.root, days=0, hours=0, delete=True)
    assert all(run.store.find(one.stage, one.key) for one in made.values())


@pytest.mark.parametrize(
    ("start", "gate", "is_refused"),
    [
        ("champion", [], True),
        ("champion", ["cmmd < champion"], True),
        ("base", ["cmmd < champion"], True),
        ("base", ["cmmd < base"], False),
    ],
)
def test_pictures_that_the_champion_was_trained_on_are_not_held_out(
    run: Run, monkeypatch: pytest.MonkeyPatch, start: str, gate: list[str], is_refused: bool
) -> None:
    publish_model(run, "first")
    monkeypatch.setattr(flow, "plan_changes", lambda *_: (None, CHANGES))
    monkeypatch.setattr(flow.download_stage, "plan", lambda *_: None)
    monkeypatch.setattr(DecisionStage, "parts", KeyParts("retrain", 1, {}, {}))
    monkeypatch.setattr(flow, "check_start", lambda *_: None)
    had = run.recipe.encode.holdout

    def compare(holdout: float) -> None:
        given = {"store": run.recipe.store, "retrain.start": start, "publish.gate": gate}
        recipe = load_recipe("digits", {**given, "encode.holdout": holdout})
        flow.compare.fn(replace(run, recipe=recipe))

    compare(had / 2)  # a part of the pictures that the champion did not see
    compare(had)
    refused = pytest.raises(
        Failed, match=f"holdout: 0.3 holds out .* champion was trained on: set {had:g}, as it"
    )
    with refused if is_refused else nullcontext():
        compare(had * 2)


@pytest.mark.parametrize(
    ("changed", "is_refused"),
    [
        ({}, True),
        ({"source": "larger pictures of first"}, True),
        ({"source": "another"}, False),
        ({"stages": STAGES[:-1]}, False),
        ({"gate": ["cmmd < base"]}, False),
        ({"force": "they look better"}, False),
        ({"stored": True}, False),  # perhaps the weights of an earlier version
    ],
)
def test_a_run_holds_out_no_pictures_that_the_champion_was_trained_on(
    run: Run, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], is_refused: bool
) -> None:
    case = {"gate": ["cmmd < champion"], "source": "first", "stored": False, **changed}
    chosen = {name: value for name, value in changed.items() if name in ("stages", "force")}
    weights = KeyParts("train", 1, {}, {"name": "weights"})

    class Trained(Exception):
        pass

    def trains(*_: Any) -> None:
        raise Trained

    publish_model(run, "first")
    monkeypatch.setattr(finetune, "check_gate_rules", lambda *_: None)
    monkeypatch.setattr(finetune, "open_latents", lambda _: SimpleNamespace(training=9))
    monkeypatch.setattr(TrainStage, "parts", weights)
    monkeypatch.setattr(Run, "begin", trains)
    if case["stored"]:
        commit(run, "train", "weights")
    had = run.recipe.encode.holdout
    for holdout, error in ((had, Trained), (had * 2, Failed if is_refused else Trained)):
        given = {"store": run.recipe.store, "publish.gate": case["gate"], "encode.holdout": holdout}
        other = replace(run, recipe=load_recipe("digits", given), **chosen)
        images = commit(run, "download", case["source"])
        latents = commit(other, "encode", "more held out", images=images)
        with pytest.raises(error):
            finetune.train.fn(other, result_of(latents))


def test_a_champion_of_another_store_is_refused(run: Run) -> None:
    trained = publish_model(run, "first")["train"]
    run.store.fs.rm(trained.path, recursive=True)
    with pytest.raises(Refused, match=r"no artifact train .* of the champion v1: publish a model"):
        find_champion(publish.registry_of(run.recipe), run.store)


def test_a_champion_that_changed_since_the_start_ends_the_retraining(run: Run) -> None:
    first = publish_model(run, "first")
    registry = publish.registry_of(run.recipe)
    check_start_is_champion(registry, "v1", "a model")
    publish_model(run, "second", start=first)
    with pytest.raises(Failed, match="the champion was v1 at the start and is v2 now"):
        check_start_is_champion(registry, "v1", "a model")
    results = [result_of(one) for one in (*first.values(), commit(run, "publish", "third"))]
    with pytest.raises(Away, match="v2 became the champion meanwhile"):
        register(run.recipe, run.base, run.store, results, {}, "v1")
    registered = register(run.recipe, run.base, run.store, results, {}, "v2")
    assert registered["champion"]["version"] == "v3" and registered["is_new"]
    again = register(run.recipe, run.base, run.store, results, {}, "v3")
    assert not again["is_new"]  # so that it is announced once


def test_a_retraining_whose_own_model_became_the_champion_goes_on(run: Run) -> None:
    """The task is retried after a promotion whose answer was lost."""
    first = publish_model(run, "first")
    registry = publish.registry_of(run.recipe)
    second = publish_model(run, "second", start=first)
    check_start_is_champion(registry, "v1", second["train"].digest)
    with pytest.raises(Failed, match="the champion was v1 at the start and is v2 now"):
        check_start_is_champion(registry, "v1", first["train"].digest)


def test_a_published_model_without_its_registry_is_published_again(run: Run) -> None:
    report = {"status": "published", "model": "r/v1"}
    stage = DecisionStage(run.recipe, CHANGES, None, {}, report)
    run.build(stage)
    assert stage.why_unchanged(run.store) is None


def test_a_second_retraining_of_a_model_waits_for_the_first(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kiln")
    entered = threading.Event()

    def second() -> None:
        with one_at_a_time(publish.registry_of(run.recipe)):
            entered.set()

    thread = threading.Thread(target=second)
    with one_at_a_time(publish.registry_of(run.recipe)):
        thread.start()
        wait_until(lambda: "retrains digits; waiting" in caplog.text)
        assert not entered.is_set()
    thread.join(60)
    assert entered.is_set()


@pytest.mark.parametrize(
    ("report", "why"),
    [
        ({"status": "rejected", "model": None}, "the gate rejected a model of these 90 rows"),
        ({"status": "published", "model": "r/v2"}, "v2 of these rows was published before, and v1"),
    ],
)
def test_a_decision_is_remembered_for_its_source_champion_and_settings(
    run: Run, report: dict[str, Any], why: str
) -> None:
    publish_model(run, "first")
    recipe, store, champion = (
        run.recipe,
        run.store,
        find_champion(publish.registry_of(run.recipe), run.store),
    )
    stage = DecisionStage(recipe, CHANGES, champion, MODELS, report)
    assert stage.why_unchanged(store) is None
    run.build(stage)
    assert why in str(stage.why_unchanged(store))
    assert champion is not None
    gate = recipe.publish.model_copy(update={"gate": ("cmmd < base",)})
    for other in (
        (recipe, replace(CHANGES, source="other"), champion),
        (recipe, CHANGES, replace(champion, digest="other")),
        (recipe, CHANGES, None),
        (recipe.model_copy(update={"publish": gate}), CHANGES, champion),
    ):
        assert DecisionStage(*other, MODELS).why_unchanged(store) is None
    judged_otherwise = {**MODELS, "clip": "another"}
    assert DecisionStage(recipe, CHANGES, champion, judged_otherwise).why_unchanged(store) is None


def test_a_retraining_waits_for_a_candidate_or_replaces_it(run: Run) -> None:
    publish_model(run, "first")
    registry = publish.registry_of(run.recipe)
    champion = find_champion(registry, run.store)
    replacing = run.recipe.retrain.model_copy(update={"candidate": "replace"})
    recipe = run.recipe.model_copy(update={"retrain": replacing})
    decided = {"status": "awaiting", "model": registry.url("v2")}
    run.build(DecisionStage(recipe, CHANGES, champion, MODELS, decided))

    def why(recipe: Recipe, source: str = CHANGES.source) -> str:
        changes = replace(CHANGES, source=source)
        return str(DecisionStage(recipe, changes, champion, MODELS).why_unchanged(run.store))

    def propose(days: float) -> None:
        version = registry.publish(commit(run, "publish", "second"))
        registry.propose(version, days, expected="v1", bound=True, hub=None)

    propose(days=1)
    assert "v2 awaits approval until" in why(run.recipe)
    assert "v2 awaits approval until" in why(run.recipe, "more rows")
    assert "v2 awaits approval until" in why(recipe)
    assert why(recipe, "more rows") == "None"
    registry.reject("v2", "anna", "too thin")
    for waits_or_replaces in (run.recipe, recipe):
        assert "v2 was rejected by anna: too thin" in why(waits_or_replaces)
        assert why(waits_or_replaces, "more rows") == "None"


def test_a_retraining_asks_anew_for_an_expired_candidate(run: Run) -> None:
    publish_model(run, "first")
    registry = publish.registry_of(run.recipe)
    champion = find_champion(registry, run.store)
    decided = {"status": "awaiting", "model": registry.url("v2")}
    stage = DecisionStage(run.recipe, CHANGES, champion, MODELS, decided)
    run.build(stage)
    version = registry.publish(commit(run, "publish", "second"))
    registry.propose(version, -1, expected="v1", bound=True, hub=None)
    assert stage.why_unchanged(run.store) is None
    registry.propose(version, 1, expected="v1", bound=True, hub=None)
    registry.approve("v2", "anna", "")
    registry.rollback()
    assert "v2 of these rows was published before" in str(stage.why_unchanged(run.store))


def test_an_undecided_model_is_judged_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """`evaluate.max_pictures`, which is in no key, may allow more pictures."""
    publish_model(run, "first")
    champion = find_champion(publish.registry_of(run.recipe), run.store)
    monkeypatch.setattr(Run, "model_digests", lambda _: MODELS)
    run = replace(run, champion=champion)
    report: dict[str, Any] = {"model": None, "stages": {}}
    stage = DecisionStage(run.recipe, CHANGES, champion, MODELS)
    flow.conclude.fn(run, CHANGES, report | {"status": "undecided"})
    assert stage.why_unchanged(run.store) is None
    flow.conclude.fn(run, CHANGES, report | {"status": "published", "model": "digits/v2"})
    assert stage.why_unchanged(run.store) == (
        "v2 of these rows was published before, and v1 is champion again"
    ), "a rollback stays"


@pytest.mark.parametrize("stage", ["download", "encode", "train", "evaluate", "publish"])
def test_a_decision_is_made_again_with_another_version_of_a_stage(
    run: Run, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    about = (run.recipe, CHANGES, None, MODELS)
    before = DecisionStage(*about).parts
    assert DecisionStage(*about).parts == before
    monkeypatch.setattr(getattr(decision, stage), "VERSION", 99)
    assert DecisionStage(*about).parts.key != before.key


def test_few_new_rows_are_no_reason_to_train(run: Run) -> None:
    publish_model(run, "first")
    champion = find_champion(publish.registry_of(run.recipe), run.store)
    more = run.recipe.retrain.model_copy(update={"min_new_rows": 40})
    recipe = run.recipe.model_copy(update={"retrain": more})
    assert DecisionStage(recipe, CHANGES, champion, MODELS).why_unchanged(run.store) == (
        "the source has 30 new rows since v1, fewer than 40"
    )
    removed = replace(CHANGES, new_rows=0, removed_rows=7)
    assert DecisionStage(run.recipe, removed, champion, MODELS).why_unchanged(run.store) == (
        "the source has no new rows since v1; 7 rows were removed"
    )
    assert DecisionStage(recipe, CHANGES, None, MODELS).why_unchanged(run.store) is None


def test_a_decision_that_cannot_be_recorded_fails_no_published_model(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stage(name: str) -> Any:
        result = StageResult(name, "key", "uri", "digest", "built", 0.0)
        return lambda *_: SimpleNamespace(result=lambda: result)

    def conclude(*_: Any) -> Any:
        raise OSError("no route to host")

    monkeypatch.setattr(flow, "TASKS", {name: stage(name) for name in STAGES})
    monkeypatch.setattr(flow, "training_task", lambda run: stage("train"))
    monkeypatch.setattr(flow, "compare", lambda run: flow.Compared(None, CHANGES, None))
    monkeypatch.setattr(flow, "conclude", conclude)
    for module in (flow, finetune):
        monkeypatch.setattr(module, "run_task", lambda task, *given, name=None: task(*given))
    assert flow._retrain(run)["status"] == "published"
    assert "the decision is not recorded" in caplog.text
