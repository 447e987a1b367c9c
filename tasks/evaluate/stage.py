"""The evaluate stage: base and tuned model draw the same prompts from the same noise."""

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

from artifacts.keys import digest_json
from artifacts.models import digest_model, resolve_model
from artifacts.store import Artifact, Draft, KeyParts, Shard, Store
from configs.schema import Recipe
from runtimes.contract import WrongInput
from runtimes.families.unet_inputs import ExtraInputs
from runtimes.objective.scheduler_config import read_schedule
from runtimes.sample import start
from tasks.encode.transform import TransformSettings
from tasks.evaluate import grid
from tasks.evaluate.judges import check_prompts
from tasks.evaluate.measure import (
    MetricSuite,
    all_prompts,
    as_rows,
    compared_sets,
    fingerprint,
    loss_facts,
    sampling_spec,
    slices_by_set,
)
from tasks.evaluate.metrics import Metric
from tasks.evaluate.pictures import (
    STAGE,
    VERSION,
    EvalModel,
    Run,
    SamplingSpec,
    digest_pipeline,
    draw,
    progress_callback,
    read_pictures,
    scratch,
)
from tasks.evaluate.prompts import PromptSets, prompt_sets
from tasks.evaluate.published import load_published_model
from tasks.panels import Panel, Picture, Table
from tasks.process import run_job
from tasks.progress import Progress
from tasks.stage import runtime_facts
from tasks.trained_weights import local_weights, weights_content

METRICS = "metrics.json"
GRID = "before_after.png"
MODELS = ("base", "tuned")
log = logging.getLogger("kiln")


def settings_for_key(recipe: Recipe) -> dict[str, Any]:
    """The settings that change pictures or metrics: prompts by their words, not by their file."""
    settings = recipe.evaluate.model_dump(
        mode="json", exclude={"prompts", "clip", "device", "batch_size"}
    )
    return {
        **settings,
        "prompts": {name: list(prompts) for name, prompts in prompt_sets(recipe).items()},
        "compared": compared_sets(recipe),
        "reference": vars(TransformSettings.of(recipe)),
        "noise_offset": recipe.train.noise_offset,
    }


def inputs(
    recipe: Recipe,
    images: Artifact,
    latents: Artifact,
    trained: Artifact,
    model_folder: Path,
    vae_folder: Path | None,
    clip_folder: Path,
) -> dict[str, str]:
    """Digests of all that is drawn with and measured against."""
    found = {
        "images": images.digest,
        "latents": latents.digest,
        "model": trained.digest,
        "base": digest_pipeline(model_folder),
        "clip": digest_model(clip_folder),
    }
    return found | ({} if vae_folder is None else {"vae": digest_model(vae_folder)})


def key_parts(
    recipe: Recipe,
    images: Artifact,
    latents: Artifact,
    trained: Artifact,
    model_folder: Path,
    vae_folder: Path | None,
    clip_folder: Path,
) -> KeyParts:
    """What the evaluation depends on: settings, both models, and what they are measured against."""
    found = inputs(recipe, images, latents, trained, model_folder, vae_folder, clip_folder)
    return KeyParts(STAGE, VERSION, settings_for_key(recipe), found)


def check(recipe: Recipe) -> None:
    """Raise WrongInput for prompts that cannot be read, or that a judge cannot judge."""
    check_prompts(recipe.evaluate.judges, all_prompts(prompt_sets(recipe)))


def check_size(recipe: Recipe, model_folder: Path, vae_folder: Path | None = None) -> None:
    """Raise WrongInput for a picture size that the model cannot draw."""
    given = recipe.evaluate
    asked = {"evaluate.height": given.height, "evaluate.width": given.width}
    start.check_size(asked, model_folder, vae_folder)


def build(
    recipe: Recipe,
    images: Artifact,
    latents: Artifact,
    trained: Artifact,
    model_folder: Path,
    vae_folder: Path | None,
    clip_folder: Path,
    draft: Draft,
    progress: Progress,
    *,
    run: Run = run_job,
) -> dict[str, Any]:
    """Draw with both models, measure, and put metrics, pictures and the grid into the draft."""
    conditions = sampling_spec(recipe, latents)
    base = EvalModel(_digest(model_folder, vae_folder, None), model_folder, vae=vae_folder)
    with scratch(draft) as folder, local_weights(trained) as tuned:
        digest = _digest(model_folder, vae_folder, trained)
        models = [base, EvalModel(digest, model_folder, tuned, vae_folder)]
        shards = draw(
            models, conditions, draft.store, folder, run, progress_callback("evaluate", progress)
        )
    log.info("evaluate: measuring %d pictures a model", len(conditions.prompts))
    suite = MetricSuite.of(recipe, images, latents, clip_folder)
    measured = [suite.measure(draft.store, shard) for shard in shards]
    found = {
        name: {model: one[name] for model, one in zip(MODELS, measured, strict=True)}
        for name in measured[0]
    }
    mark = fingerprint(recipe, images, latents, model_folder, vae_folder, clip_folder)
    for shard in shards:
        draft.add_shard(shard)
    text = json.dumps({"metrics": found, "fingerprint": mark}, indent=1, allow_nan=False)
    draft.write(METRICS, text.encode())
    draft.write(GRID, _grid(draft.store, shards, suite.sets))
    return {
        "pictures": len(conditions.prompts),
        "fingerprint": mark,
        "metrics": found,
        "run": runtime_facts(recipe.runtime),
    }


def _measure(
    model: EvalModel, conditions: SamplingSpec, suite: MetricSuite, store: Store, run: Run
) -> dict[str, Metric]:
    """Metrics of what one model draws."""
    with tempfile.TemporaryDirectory(prefix="kiln-evaluate-") as scratch:
        shards = draw([model], conditions, store, Path(scratch), run)
    return suite.measure(store, shards[0])


def metrics_of_published(
    recipe: Recipe,
    uri: str,
    images: Artifact,
    latents: Artifact,
    model_folder: Path,
    vae_folder: Path | None,
    clip_folder: Path,
    evaluated: Artifact,
    *,
    run: Run = run_job,
) -> dict[str, dict[str, Metric]]:
    """A published model's metrics as its `tuned` ones, comparable with those of `evaluated`.

    What was measured when it was published is taken if it was measured the same way, and its files
    are not even fetched; if not, the model draws again. Its held-out loss is then left out if it is
    the error of something else.
    """
    wanted = json.loads(evaluated.read(METRICS))["fingerprint"]
    published = _published_metrics(uri)
    if published.get("fingerprint") == wanted:
        found = {name: metric["tuned"] for name, metric in published["metrics"].items()}
    else:
        log.info("evaluate: measuring the champion again, as it was measured otherwise")
        model, conditions = load_published_model(resolve_model(uri)), sampling_spec(recipe, latents)
        if not _same_loss(recipe, model, model_folder, vae_folder):
            conditions = replace(conditions, latents=None)  # it may not even take ours
        suite = MetricSuite.of(recipe, images, latents, clip_folder)
        found = _measure(model, conditions, suite, evaluated.store, run)
    return {name: {"tuned": metric} for name, metric in found.items()}


def _same_loss(
    recipe: Recipe, model: EvalModel, model_folder: Path, vae_folder: Path | None
) -> bool:
    """Whether a model predicts the same thing, seeing the same, as what we tune."""
    theirs = read_schedule(model.part("scheduler"))
    ours = read_schedule(model_folder / "scheduler", recipe.train)
    return loss_facts(theirs, model.folder, model.vae, model.extras) == loss_facts(
        ours, model_folder, vae_folder, ExtraInputs.from_settings(recipe.train)
    )


def show(artifact: Artifact) -> list[Panel]:
    """The before/after grid and the metrics."""
    return [
        Picture("Before (base) and after (tuned)", artifact.read(GRID)),
        Table("Metrics, with 95% confidence intervals", as_rows(artifact.summary["metrics"])),
    ]


def _digest(model_folder: Path, vae_folder: Path | None, trained: Artifact | None) -> str:
    return digest_json(
        {
            "pipeline": digest_pipeline(model_folder),
            "vae": None if vae_folder is None else digest_model(vae_folder),
            "tuned": None if trained is None else weights_content(trained),
        }
    )


def _grid(store: Store, shards: list[Shard], sets: PromptSets) -> bytes:
    prompts = all_prompts(sets)
    chosen = {
        name: [part.start + number for number in grid.choose(prompts[part])]
        for name, part in slices_by_set(sets).items()
    }
    wanted = {number for numbers in chosen.values() for number in numbers}
    drawn: list[dict[int, NDArray[np.uint8]]] = [
        {n: picture for n, picture in enumerate(read_pictures(store, shard)) if n in wanted}
        for shard in shards
    ]
    columns = {
        name: [grid.Column(prompts[n], tuple(model[n] for model in drawn)) for n in numbers]
        for name, numbers in chosen.items()
    }
    return grid.render(columns, MODELS)


def _published_metrics(uri: str) -> dict[str, Any]:
    try:
        with fsspec.open(f"{uri}/{METRICS}", "rb") as stream:
            found = json.load(stream)
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        raise WrongInput(f"{uri}/{METRICS}: not an evaluation's metrics")
    return found
