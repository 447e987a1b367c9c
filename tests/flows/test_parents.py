"""What a run's stages are made from is in their keys, and who becomes champion was compared."""

import json
from pathlib import Path
from typing import Any

import pytest

from artifacts import gc
from artifacts.latents import INFO
from artifacts.store import Artifact, KeyParts, Store
from configs.load import load_recipe
from flows.finetune import _Run
from flows.preflight import Prepared
from tasks import download
from tasks.publish import registry_of
from tasks.stage import StageResult, TransientError, build_or_reuse


def commit(store: Store, stage: str, number: int, inputs: dict[str, str]) -> Artifact:
    draft = store.draft(KeyParts(stage, 1, {"number": number}, inputs))
    draft.write("metrics.json", json.dumps({"metrics": {}, "number": number}).encode())
    draft.write("model.bin", f"{stage} {number}".encode())
    draft.write(INFO, b"{}")
    return draft.commit({}, {})


class Asked(_Run):
    """A run that only takes note of what each stage's key would have."""

    def _stage(
        self, module: Any, inputs: dict[str, str], build: Any, **parents: Artifact
    ) -> Artifact:
        self.inputs = inputs
        return next(iter(parents.values()), None)  # type: ignore[return-value]


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    recipe = load_recipe(
        "digits",
        {
            "store": str(tmp_path / "store"),
            "source": {"kind": "urls", "path": str(tmp_path / "list.csv"), "format": "csv"},
            "publish.gate": ["cmmd <= champion"],
            "evaluate.judges": [],
        },
    )
    (tmp_path / "list.csv").write_text("url,caption\nhttp://127.0.0.1/,a\n")
    base = Path(recipe.model.path)
    return Prepared(recipe, Store(recipe.store), base, None, base / "evaluator")


def test_a_stage_is_known_by_all_that_it_is_made_from(prepared: Prepared) -> None:
    run, store = Asked(prepared), prepared.store
    images, latents, trained, evaluated = (
        commit(store, stage, 1, {"source": "s", "base": "b"})
        for stage in ("download", "encode", "train", "evaluate")
    )
    run.download()
    assert run.inputs == {"source": download.plan(prepared.recipe).source_digest}
    run.encode(images)
    assert run.inputs["images"] == images.digest and "encoders" in run.inputs
    run.recipe = prepared.recipe.model_copy(update={"publish": _without_gate(prepared)})
    run.train(latents)
    assert run.inputs == {"latents": latents.digest, "base": prepared.base_digest()}
    run.evaluate(images, latents, trained)
    assert {"images", "latents", "model", "base", "clip"} == run.inputs.keys()
    assert run.inputs["model"] == trained.digest and run.inputs["latents"] == latents.digest
    run.publish(evaluated, images, latents, trained)
    assert run.inputs["model"] == trained.digest and run.inputs["evaluation"] == evaluated.digest


def test_what_a_run_needs_is_kept_from_before_it_is_built(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[dict[str, Any]] = []

    def killed(store: Store, *_: Any) -> Any:
        kept.extend(gc.recent_runs(store, days=1))
        raise KeyboardInterrupt

    monkeypatch.setattr("flows.finetune.run_stage", killed)
    with pytest.raises(KeyboardInterrupt):
        _Run(prepared).download()
    assert [set(run["stages"]) for run in kept] == [{"download"}]


def test_what_was_built_names_what_it_was_made_from(prepared: Prepared) -> None:
    store = prepared.store
    images = commit(store, "download", 1, {})
    parts = KeyParts("encode", 1, {}, {"images": images.digest})
    made = build_or_reuse(store, parts, lambda draft: {}, parents={"images": images})
    needed = gc.needed_by(store, [("encode", made.key)])
    assert needed.keys() == {("encode", made.key), ("download", images.key)}


def _without_gate(prepared: Prepared) -> Any:
    return prepared.recipe.publish.model_copy(update={"gate": ()})


@pytest.mark.parametrize("compared_with", ["first", "second"])
def test_only_a_model_that_was_compared_with_the_champion_becomes_it(
    prepared: Prepared, compared_with: str
) -> None:
    run, store, registry = _Run(prepared), prepared.store, registry_of(prepared.recipe)
    champions = {
        name: registry.publish(commit(store, "publish", number, {}))
        for number, name in enumerate(("first", "second"))
    }
    registry.promote(champions["second"].name)
    trained, evaluated = (commit(store, s, 1, {}) for s in ("train", "evaluate"))
    run.artifacts["train"] = trained
    given = run._publish_inputs(evaluated, trained)
    assert given["champion"] == champions["second"].manifest["digest"]
    theirs = {**given, "champion": champions[compared_with].manifest["digest"]}
    published = commit(store, "publish", 9, theirs)
    run.results["publish"] = StageResult("publish", published.key, published.uri, "", "reused", 0.0)
    store.fs.pipe_file(f"{published.path}/report.html", b"")
    if compared_with == "first":
        with pytest.raises(TransientError, match="another model became champion meanwhile"):
            run.register(published, evaluated)
    else:
        run.register(published, evaluated)
    champion = registry.champion()
    assert champion is not None
    assert champion.name == ("v2" if compared_with == "first" else "v3")
