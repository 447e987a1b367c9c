"""The evaluate stage: the base and the tuned model sample equal prompts from equal noise."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from artifacts.latent_shards import open_latents
from artifacts.store import Artifact, Draft, Shard, Store
from configs.errors import Refused
from configs.settings.evaluate import Evaluate
from configs.settings.recipe import Recipe
from configs.settings.train_parts import HOLDOUT_LOSS
from runtimes.pipeline_folder.folder import Base
from runtimes.sample import conditioning
from tasks.build_or_reuse import BOOTSTRAP, GRID, METRICS, Stage
from tasks.code_version import runtime_facts
from tasks.cut_captions import tell_cut_prompts
from tasks.encode.transform import TransformSettings
from tasks.evaluate import draw, measure
from tasks.evaluate.distances import Estimates, Metric, differences, from_npz, to_npz
from tasks.evaluate.draw import STAGE, RunJob, compare_pictures
from tasks.evaluate.inputs import VERSION, EvalInputs, fingerprint, same_loss, sampling_spec
from tasks.evaluate.judges import check_prompts, check_sides, judge_names
from tasks.evaluate.memorization import closest_pairs, copies_table, render_pairs
from tasks.evaluate.metrics import (
    LOWER_IS_BETTER,
    PromptSets,
    all_prompts,
    by_set,
    compared_sets,
    lower_is_better,
    metric_names,
    metric_rows,
    prompt_sets,
    slices_by_set,
    with_ranges,
)
from tasks.panels import Chart, Panel, PicturePanel, Table
from tasks.panels_charts import intervals_chart
from tasks.progress import Progress
from tasks.run_job import run_job
from tasks.trained_weights import local_weights

PAIRS = "closest_pairs.png"
MODELS = ("base", "tuned")
log = logging.getLogger("kiln")


def settings_for_key(recipe: Recipe) -> dict[str, Any]:
    """The settings that affect pictures or metrics, with the prompts' text instead of the file."""
    return {
        **recipe.evaluate.key_settings(),
        # A digest sorts names, and a picture's number selects its noise.
        "sets": list(recipe.evaluate.prompts),
        "prompts": {name: list(prompts) for name, prompts in prompt_sets(recipe.evaluate).items()},
        "judges": judge_names(recipe.evaluate.judges),
        "compared": compared_sets(recipe.evaluate),
        "reference": asdict(TransformSettings.of(recipe)),
        "holdout_loss": recipe.train.holdout_loss_inputs,
    }


def check(recipe: Recipe) -> None:
    """Raise Refused for an unreadable prompt file, or a judge with a wrong prompt or name."""
    known = Counter(metric_names(recipe))
    for judge in judge_names(recipe.evaluate.judges):
        names = by_set(judge, recipe.evaluate.prompts)
        if judge in LOWER_IS_BETTER or any(known[name] > 1 for name in names):
            raise Refused(f"evaluate.judges: {judge} is the name of another metric: rename it")
    check_prompts(recipe.evaluate.judges, all_prompts(prompt_sets(recipe.evaluate)))


def check_drawn_size(settings: Evaluate, base: Base) -> None:
    """Raise Refused for a picture size that the model or a judge does not support."""
    sides = {"height": settings.height, "width": settings.width}
    conditioning.check_size({f"evaluate.{name}": n for name, n in sides.items()}, base)
    scale = base.encoders["vae_scale_factor"]
    size = conditioning.image_size(sides, base.family, base.denoiser, scale)
    check_sides(settings.judges, *size)


@dataclass(frozen=True)
class EvaluateStage(Stage):
    """The base and the tuned model, measured on equal prompts and noise."""

    data: EvalInputs
    trained: Artifact
    run: RunJob = run_job

    name = STAGE
    version = VERSION

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that affect pictures or metrics."""
        return settings_for_key(self.data.recipe)

    @property
    def inputs(self) -> dict[str, str]:
        """Both models, those that measure, and the reference data."""
        return self.data.digests() | {"model": self.trained.digest}

    @property
    def parents(self) -> dict[str, Artifact]:
        """The reference data and the trained weights."""
        return {"images": self.data.images, "latents": self.data.latents, "model": self.trained}

    @measure.memory_released()
    def build(self, draft: Draft, progress: Progress) -> dict[str, Any]:
        """Sample with both models, and write metrics, pictures and the grid into the draft."""
        data = self.data
        spec = sampling_spec(data)
        store = draft.store
        if spec.latents is None:
            log.warning(
                "evaluate: no held-out picture (encode.holdout): no holdout_loss, no distances"
            )
        cuts = tell_cut_prompts(STAGE, data.base, spec.prompts)
        with draw.scratch(draft) as folder, local_weights(self.trained) as weights:
            models = [data.model(), data.model(self.trained, weights)]
            on_event = draw.progress_callback(progress)
            shards = draw.draw(models, spec, store, folder, self.run, on_event)
        drawn = dict(zip(MODELS, shards, strict=True))
        log.info("evaluate: measuring %d pictures per model", len(spec.prompts))
        suite = measure.MetricSuite.of(data, store, progress)
        base, tuned = (
            suite.measure(store, shard, name, progress)
            for name, shard in zip(("base", "tuned model"), shards, strict=True)
        )
        measured: dict[str, Estimates] = {"base": base.metrics, "tuned": tuned.metrics}
        _check_finite(measured)
        if not same_loss(data, models[0]):
            measured["base"] = _without_loss(base.metrics)
        for shard in [*shards, *suite.shards]:
            draft.add_shard(shard)
        draft.write(BOOTSTRAP, to_npz(measured))
        draft.write(GRID, _grid(store, drawn, suite.sets))
        compared = differences(tuned.metrics, measured["base"])
        facts = {
            "metrics": metrics_by_name(measured),
            "differences": {name: {"base": estimate} for name, estimate in compared.items()},
            "memorization": _memorization(data, suite, store, shards[-1], tuned, draft),
            "fingerprint": fingerprint(data),
        }
        draft.write(METRICS, json.dumps(facts, indent=1, allow_nan=False).encode())
        run_facts = runtime_facts(data.recipe.runtime)
        keys = {model: shard.key for model, shard in drawn.items()}
        counts = {"pictures": len(spec.prompts), "cut": cuts, "drawn": keys}
        return {**counts, **facts, "run": run_facts}

    def facts(self, summary: dict[str, Any]) -> dict[str, Any]:
        """The metrics of both models, and their differences."""
        return compared_metrics(summary)

    @staticmethod
    def show(artifact: Artifact, champion: Artifact | None = None) -> list[Panel]:
        """The pictures of all models side by side, the metrics, and the pairs closest to copies.

        Args:
            champion: a comparable evaluation of the champion.
        """
        summary = artifact.summary
        metrics = summary["metrics"]
        compared = summary["differences"]
        if champion is not None:
            own = champion.summary["metrics"]
            theirs = {n: {"champion": own[n]["tuned"]} for n in own if "tuned" in own[n]}
            metrics = {n: m | theirs.get(n, {}) for n, m in metrics.items()}
            tuned = (read_estimates(evaluated)["tuned"] for evaluated in (artifact, champion))
            paired = differences(*tuned)
            compared = {
                n: m | ({"champion": paired[n]} if n in paired else {}) for n, m in compared.items()
            }
        panels: list[Panel] = [
            compare_pictures(artifact, champion),
            Chart("Metrics", intervals_chart(metrics, lower_is_better)),
            Table(
                "Metrics and paired differences, with 95% confidence intervals",
                metric_rows(metrics, compared),
            ),
        ]
        return panels + show_closest_pairs(artifact)


def compared_metrics(measured: Mapping[str, Any]) -> dict[str, Any]:
    """What a run reports of metrics.json: the metrics of all models, and their differences."""
    return {name: measured[name] for name in ("metrics", "differences") if name in measured}


def _check_finite(models: Mapping[str, Estimates]) -> None:
    """Raise Refused for a metric without a value: no rule of a gate can compare it."""
    for model, estimates in models.items():
        for name, estimate in estimates.items():
            if not np.isfinite(estimate.value):
                raise Refused(
                    f"{name} of the {model} model is {estimate.value}: its weights are not finite, "
                    "or its activations exceed evaluate.dtype"
                )


def _without_loss(estimates: Estimates) -> Estimates:
    """The metrics of a base that predicts another quantity than the trained model."""
    log.info("evaluate: the base predicts another quantity: no %s of it", HOLDOUT_LOSS)
    return {k: estimate for k, estimate in estimates.items() if not k.startswith(HOLDOUT_LOSS)}


def metrics_by_name(models: Mapping[str, Estimates]) -> dict[str, dict[str, Metric]]:
    """Metric name -> model -> metric, as in metrics.json."""
    names = dict.fromkeys(name for estimates in models.values() for name in estimates)
    return {
        name: {model: own[name].metric() for model, own in models.items() if name in own}
        for name in names
    }


def read_estimates(evaluated: Artifact, models: Sequence[str] = MODELS) -> dict[str, Estimates]:
    """Model -> its metrics, for some models of an evaluation."""
    metrics = json.loads(evaluated.read(METRICS))["metrics"]
    resampled = evaluated.read(BOOTSTRAP)
    return {model: with_ranges(from_npz(resampled, metrics, model)) for model in models}


def _memorization(
    inputs: EvalInputs,
    suite: measure.MetricSuite,
    store: Store,
    shard: Shard,
    tuned: measure.Measured,
    draft: Draft,
) -> dict[str, Any]:
    """The facts of the search for training pictures; the closest pairs are drawn as a picture."""
    facts = measure.memorization_facts(suite)
    if tuned.nearest is None:
        return facts
    pairs = closest_pairs(tuned.nearest, suite.training["image"])
    settings = TransformSettings.of(inputs.recipe)
    factor = open_latents(inputs.latents.uri).info["size_step"]
    wanted = {(pair.tar, pair.key) for pair in pairs}
    training = measure.find_pictures(inputs.training, wanted, settings, factor)
    samples = draw.read_chosen(store, shard, {pair.sample for pair in pairs})
    drawn = [(pair, samples[pair.sample], training[pair.tar, pair.key]) for pair in pairs]
    draft.write(PAIRS, render_pairs(drawn))
    prompts = all_prompts(suite.sets)
    closest = [{**vars(pair), "prompt": prompts[pair.sample]} for pair in pairs]
    return {**facts, "closest_pairs": closest}


def show_closest_pairs(artifact: Artifact) -> list[Panel]:
    """The search for copies among the tuned model's samples; empty without training pictures."""
    summary = artifact.summary
    if "closest_pairs" not in summary["memorization"]:
        return []
    tuned = {name: models["tuned"] for name, models in summary["metrics"].items()}
    rows = copies_table(summary["memorization"], tuned)
    return [
        Table("Search for copies of training pictures", rows),
        PicturePanel("Samples closest to training pictures", artifact.read(PAIRS)),
    ]


def _grid(store: Store, shards: Mapping[str, Shard], sets: PromptSets) -> bytes:
    prompts = all_prompts(sets)
    chosen = {
        name: [part.start + number for number in draw.choose(prompts[part])]
        for name, part in slices_by_set(sets).items()
    }
    wanted = {number for numbers in chosen.values() for number in numbers}
    drawn = {model: draw.read_chosen(store, shard, wanted) for model, shard in shards.items()}
    columns: dict[str, list[draw.Column]] = {
        name: [(prompts[n], {model: shown[n] for model, shown in drawn.items()}) for n in numbers]
        for name, numbers in chosen.items()
    }
    return draw.render(columns)
