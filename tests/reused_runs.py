"""A run whose stages are reused, for the keys, records and promotions of flows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from toy_recipes import base_of

from artifacts.latent_shards import INFO
from artifacts.store import Artifact, KeyParts, Store
from configs.load_recipe import load_recipe
from flows.run import Run
from tasks.build_or_reuse import StageResult
from tasks.evaluate.inputs import MeasuringModels
from tasks.publish.stage import PublishStage


def run_of_digits(folder: Path) -> Run:
    """A run of `digits` with a new store, from a list of one URL."""
    url_list = folder / "list.csv"
    url_list.write_text("url,caption\nhttp://127.0.0.1/,a\n")
    recipe = load_recipe(
        "digits",
        {
            "store": str(folder / "store"),
            "source": {"kind": "urls", "path": str(url_list), "format": "csv"},
            "publish.gate": ["cmmd <= champion"],
            "evaluate.judges": [],
        },
    )
    base = base_of(recipe)
    measuring = MeasuringModels(base.folder / "evaluator")
    return Run(recipe, Store(recipe.store), base, measuring, "a-run")


def commit(
    store: Store, stage: str, number: int, inputs: dict[str, str], **measured: Any
) -> Artifact:
    draft = store.draft(KeyParts(stage, 1, {"number": number}, inputs))
    measured = {"metrics": {}, "number": number, **measured}
    draft.write("metrics.json", json.dumps(measured).encode())
    draft.write("model.bin", f"{stage} {number}".encode())
    draft.write(INFO, b"{}")
    return draft.commit({"forced": None}, {})


def reused(artifact: Artifact) -> StageResult:
    """The result of a reused artifact."""
    return StageResult(artifact.stage, artifact.key, artifact.uri, artifact.digest, "reused", 0.0)


def published_by(run: Run, number: int = 9) -> list[StageResult]:
    """The results of a run whose stages are reused, without a report to write."""
    before = [
        commit(run.store, stage, number, {"source": "s", "base": "b"})
        for stage in ("download", "encode", "train", "evaluate")
    ]
    inputs = PublishStage(run.recipe, run.base, before[2], before[3]).inputs
    made = commit(run.store, "publish", number, inputs)
    run.store.fs.pipe_file(f"{made.path}/report.html", b"")
    return [reused(artifact) for artifact in (*before, made)]


def publishing(run: Run, **settings: Any) -> Run:
    changed = run.recipe.publish.model_copy(update=settings)
    return replace(run, recipe=run.recipe.model_copy(update={"publish": changed}))
