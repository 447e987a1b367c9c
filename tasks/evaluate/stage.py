"""The evaluate stage: the base and the tuned model sample equal prompts from equal noise."""

from __future__ import annotations

import json
import logging
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from numpy.typing import NDArray

from artifacts.artifact_key import KeyParts
from artifacts.resolve_model import resolve_model
from artifacts.store import Artifact, Draft, Shard, Store
from configs.recipe import Recipe
from runtimes.contract import WrongInput
from runtimes.families.unet_inputs import ExtraInputs
from runtimes.objective.scheduler_config import read_schedule
from runtimes.sample import noise_and_components
from tasks.build_or_reuse import runtime_facts
from tasks.child_process import run_job
from tasks.encode.decode_and_crop import TransformSettings
from tasks.evaluate import before_after_grid, draw_pictures, metric_suite
from tasks.evaluate.compare_pictures import GRID, compare_pictures
from tasks.evaluate.draw_pictures import STAGE, VERSION, EvalModel, Run
from tasks.evaluate.inputs import EvalInputs
from tasks.evaluate.judges import check_prompts
from tasks.evaluate.load_published_model import load_published_model
from tasks.evaluate.metric_suite import MetricSuite, all_prompts, loss_facts
from tasks.evaluate.metrics import Metric
from tasks.evaluate.prompts import PromptSets, prompt_sets
from tasks.panels import Chart, Panel, Table
from tasks.panels_charts import intervals_chart
from tasks.progress import Progress
from tasks.trained_weights import local_weights

METRICS = "metrics.json"
MODELS = ("base", "tuned")
log = logging.getLogger("kiln")


def settings_for_key(recipe: Recipe) -> dict[str, Any]:
    """The settings that affect pictures or metrics, with the prompts' text instead of the file."""
    settings = recipe.evaluate.model_dump(
        mode="json", exclude={"prompts", "clip", "device", "batch_size"}
    )
    return {
        **settings,
        "prompts": {name: list(prompts) for name, prompts in prompt_sets(recipe).items()},
        "compared": metric_suite.compared_sets(recipe),
        "reference": vars(TransformSettings.of(recipe)),
        "noise_offset": recipe.train.noise_offset,
    }


def key_parts(given: EvalInputs, trained: Artifact) -> KeyParts:
    """The artifact's key: settings, both models and the reference data."""
    inputs = given.digests() | {"model": trained.digest}
    return KeyParts(STAGE, VERSION, settings_for_key(given.recipe), inputs)


def check(recipe: Recipe) -> None:
    """Raise WrongInput for an unreadable prompt file or a prompt that a judge does not support."""
    check_prompts(recipe.evaluate.judges, all_prompts(prompt_sets(recipe)))


def check_size(recipe: Recipe, base: Path, vae: Path | None = None) -> None:
    """Raise WrongInput for a picture size that the model does not support."""
    given = recipe.evaluate
    asked = {"evaluate.height": given.height, "evaluate.width": given.width}
    noise_and_components.check_size(asked, base, vae)


def build(
    given: EvalInputs, trained: Artifact, draft: Draft, progress: Progress, *, run: Run = run_job
) -> dict[str, Any]:
    """Sample with both models, and write metrics, pictures and the grid into the draft."""
    spec, store = metric_suite.sampling_spec(given), draft.store
    with draw_pictures.scratch(draft) as folder, local_weights(trained) as weights:
        models = [given.model(), given.model(trained, weights)]
        shards = draw_pictures.draw(
            models, spec, store, folder, run, draw_pictures.progress_callback(STAGE, progress)
        )
    log.info("evaluate: measuring %d pictures per model", len(spec.prompts))
    suite = MetricSuite.of(given)
    measured = [suite.measure(store, shard) for shard in shards]
    found = {
        name: {model: one[name] for model, one in zip(MODELS, measured, strict=True)}
        for name in measured[0]
    }
    facts = {"metrics": found, "fingerprint": metric_suite.fingerprint(given)}
    for shard in shards:
        draft.add_shard(shard)
    draft.write(METRICS, json.dumps(facts, indent=1, allow_nan=False).encode())
    draft.write(GRID, _grid(store, shards, suite.sets))
    run_facts = runtime_facts(given.recipe.runtime)
    drawn = {model: shard.key for model, shard in zip(MODELS, shards, strict=True)}
    return {"pictures": len(spec.prompts), "drawn": drawn, **facts, "run": run_facts}


def metrics_of_published(
    given: EvalInputs, evaluated: Artifact, uri: str, *, run: Run = run_job
) -> dict[str, dict[str, Metric]]:
    """A published model's metrics, comparable with the `tuned` ones of an evaluation.

    The metrics of its own publication are reused if their fingerprint is equal; its weights are
    then not read. Otherwise the model samples again. The held-out loss is then omitted if the model
    predicts another quantity or has other inputs.

    Args:
        evaluated: artifact of the evaluation.
        uri: folder or URL of the published model.
    """
    published = _published_metrics(uri)
    if published.get("fingerprint") == evaluated.summary["fingerprint"]:
        found = {name: metric["tuned"] for name, metric in published["metrics"].items()}
    else:
        log.info("evaluate: the champion has no comparable metrics: measuring it again")
        model, spec = load_published_model(resolve_model(uri)), metric_suite.sampling_spec(given)
        if not _same_loss(given, model):
            spec = replace(spec, latents=None)  # the model may not even accept our latents
        with tempfile.TemporaryDirectory(prefix="kiln-evaluate-") as folder:
            (shard,) = draw_pictures.draw([model], spec, evaluated.store, Path(folder), run)
        found = MetricSuite.of(given).measure(evaluated.store, shard)
    return {name: {"tuned": metric} for name, metric in found.items()}


def _same_loss(given: EvalInputs, model: EvalModel) -> bool:
    """Whether a model has the prediction and the inputs of the model in training."""
    theirs = read_schedule(model.part("scheduler"))
    ours = read_schedule(given.base / "scheduler", given.recipe.train)
    return loss_facts(theirs, model.folder, model.vae, model.extras) == loss_facts(
        ours, given.base, given.vae, ExtraInputs.from_settings(given.recipe.train)
    )


def show(artifact: Artifact, champion: Artifact | None = None) -> list[Panel]:
    """The pictures of all models side by side, and the metrics.

    Args:
        champion: a comparable evaluation of the champion.
    """
    shown = artifact.summary["metrics"]
    if champion is not None:
        own = champion.summary["metrics"]
        shown = {n: found | {"champion": own[n]["tuned"]} for n, found in shown.items() if n in own}
    return [
        compare_pictures(artifact, champion),
        Chart("Metrics", intervals_chart(shown)),
        Table(
            "Metrics, with 95% confidence intervals",
            metric_suite.metric_rows(artifact.summary["metrics"]),
        ),
    ]


def _grid(store: Store, shards: list[Shard], sets: PromptSets) -> bytes:
    prompts = all_prompts(sets)
    chosen = {
        name: [part.start + number for number in before_after_grid.choose(prompts[part])]
        for name, part in metric_suite.slices_by_set(sets).items()
    }
    wanted = {number for numbers in chosen.values() for number in numbers}
    drawn: list[dict[int, NDArray[np.uint8]]] = [
        {
            n: picture
            for n, picture in enumerate(draw_pictures.read_pictures(store, shard))
            if n in wanted
        }
        for shard in shards
    ]
    columns = {
        name: [(prompts[n], tuple(model[n] for model in drawn)) for n in numbers]
        for name, numbers in chosen.items()
    }
    return before_after_grid.render(columns, MODELS)


def _published_metrics(uri: str) -> dict[str, Any]:
    try:
        with fsspec.open(f"{uri}/{METRICS}", "rb") as stream:
            found = json.load(stream)
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        raise WrongInput(f"{uri}/{METRICS}: not the metrics of an evaluation")
    return found
