"""The evaluate stage: the base and the tuned model sample equal prompts from equal noise."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from PIL import Image

from artifacts.latent_shards import open_latents
from artifacts.store import Artifact, Draft, Shard, Store
from configs.errors import Refused
from configs.settings.evaluate import Edit, Evaluate, PreferenceModel
from configs.settings.recipe import Recipe
from configs.settings.train_parts import HOLDOUT_LOSS
from runtimes.families import families_with_references
from runtimes.pipeline_folder.folder import Base
from runtimes.pipeline_folder.weights import weight_shapes
from runtimes.sample import sampling_inputs
from tasks.build_or_reuse import BOOTSTRAP, GRID, METRICS, Stage
from tasks.child_process import run_job
from tasks.code_version import runtime_facts
from tasks.cut_captions import tell_cut_prompts
from tasks.encode.crop_to_bucket import TransformSettings
from tasks.evaluate import draw, edits, measure, metrics
from tasks.evaluate.distances import Estimates, Metric, differences, from_npz, to_npz
from tasks.evaluate.draw import STAGE, RunJob, compare_pictures
from tasks.evaluate.draw_on_hosts import DrawOnHosts
from tasks.evaluate.inputs import (
    VERSION,
    EvalInputs,
    fingerprint,
    same_loss,
    sampling_specs,
    sibling_facts,
    sibling_specs,
    texts_of,
)
from tasks.evaluate.judges import JUDGES, judge_names
from tasks.evaluate.memorization import closest_pairs, copies_table, render_pairs
from tasks.evaluate.seen_pictures import find_pictures
from tasks.hosts.choose import Hosts
from tasks.panels import Chart, Panel, PicturePanel, Table, to_png
from tasks.panels_charts import intervals_chart
from tasks.progress import Progress
from tasks.train import adapted_shapes, check_guidance
from tasks.trained_weights import local_weights

PAIRS = "closest_pairs.png"
#: Name in metrics.json: model -> source of a mixture -> held-out loss in each band of noise.
LEVELS = "holdout_loss_by_level"
MODELS = ("base", "tuned")
log = logging.getLogger("kiln")


def settings_for_key(recipe: Recipe, rounds: int = 1) -> dict[str, Any]:
    """The settings that affect pictures or metrics, with the prompts' text instead of the file."""
    first, *more = metrics.prompt_rounds(recipe.evaluate, rounds)
    listed = metrics.all_prompts(first, *more)
    return {
        **recipe.evaluate.key_settings(),
        # A digest sorts names, and a picture's number selects its noise.
        "sets": list(recipe.evaluate.prompts),
        "prompts": texts_of(first),
        **({"more_rounds": [*map(texts_of, more)]} if more else {}),
        **edits.key_facts(listed, edits.read_files(listed)),
        "judges": judge_names(recipe.evaluate.judges),
        "compared": metrics.compared_sets(recipe.evaluate),
        "reference": TransformSettings.of(recipe).facts,
        "holdout_loss": recipe.train.holdout_loss_inputs,
        **sibling_facts(recipe),
    }


def measured_by(recipe: Recipe) -> dict[str, Any]:
    """The base, the sampler, and the models that measure pictures, as the recipe names them."""
    sampler = {"num_inference_steps", "guidance_scale", "height", "width"}
    models = {"clip", "image_encoder", "inception"}
    settings = recipe.evaluate.model_dump(mode="json", include=models | sampler)
    return {"model": recipe.model.model_dump(mode="json"), **settings}


def check(recipe: Recipe) -> None:
    """Raise Refused for prompts, rounds or judges that cannot be evaluated."""
    metrics.most_rounds(recipe.evaluate)
    known = Counter(metrics.metric_names(recipe))
    for judge in judge_names(recipe.evaluate.judges):
        names = metrics.by_set(judge, recipe.evaluate.prompts)
        if judge in metrics.LOWER_IS_BETTER or any(known[name] > 1 for name in names):
            raise Refused(f"evaluate.judges: {judge} is the name of another metric: rename it")
    lists = metrics.listed_prompts(recipe.evaluate)
    held_out = {name for name, chosen in recipe.evaluate.prompts.items() if chosen.held_out}
    prompts = [*chain(*(own for name, own in lists.items() if name not in held_out))]
    _check_edits(recipe, held_out, prompts)
    for name in recipe.evaluate.judges:
        if isinstance(name, PreferenceModel):
            continue
        try:
            for prompt in prompts:
                JUDGES[name].parse(prompt.text, bool(prompt.references))
        except ValueError as error:
            raise Refused(
                f"{name}: {error}; for other prompts leave {name} out", setting="evaluate.judges"
            ) from None


def _check_edits(recipe: Recipe, held_out: set[str], prompts: Sequence[edits.Prompt]) -> None:
    """Raise Refused for prompts with references that cannot be drawn or are no pictures."""
    for name in sorted(held_out):
        if not any(part.encode.holdout for part in recipe.by_source.values()):
            where = f"evaluate.prompts.{name}.held_out"
            raise Refused("no sample is held out: raise encode.holdout", setting=where)
    edits.read_files(prompts)


def check_drawn_size(settings: Evaluate, base: Base) -> None:
    """Raise Refused for a picture size that the model or a judge does not support."""
    sides = {"height": settings.height, "width": settings.width}
    sampling_inputs.check_size({f"evaluate.{name}": n for name, n in sides.items()}, base)
    scale = base.encoders["vae_scale_factor"]
    size = sampling_inputs.image_size(sides, base.family, base.denoiser, scale)
    for judge in settings.judges:
        side = None if isinstance(judge, PreferenceModel) else JUDGES[judge].side
        if side is not None and size != (side, side):
            raise Refused(
                f"{judge} judges pictures of {side} x {side} pixels, not {size[0]} x "
                f"{size[1]}: set evaluate.height and width, or leave {judge} out",
                setting="evaluate.judges",
            )


def check_references(settings: Evaluate, base: Base) -> None:
    """Raise Refused for prompts with more references than the model reads."""
    most = base.family.max_references
    for name, chosen in settings.prompts.items():
        edits_of_set = [prompt for prompt in chosen.prompts if isinstance(prompt, Edit)]
        count = max((len(edit.references) for edit in edits_of_set), default=0)
        if count > most:
            raise Refused(
                f"a prompt has {count} reference{'s' if count > 1 else ''}, and a model of family "
                f"{base.family.name} reads {most or 'none'}; {families_with_references()}",
                setting=f"evaluate.prompts.{name}",
            )


def check_sibling(recipe: Recipe, base: Base, sibling: Base) -> None:
    """Raise Refused if the adapters of a base do not fit its sibling, or captions differ there."""
    if sibling.family.name != base.family.name:
        raise Refused(f"it is of family {sibling.family.name}, the base is of {base.family.name}")
    theirs = adapted_shapes(recipe.train, sibling)
    for name, shape in adapted_shapes(recipe.train, base).items():
        if (found := theirs.get(name)) != shape:
            has = "has no such layer" if found is None else f"has {found}"
            raise Refused(f"its shapes differ: {name} is {shape} in the base, and it {has}")
    for encoder in base.family.text_encoders:
        part = encoder.component
        classes = [some.class_of(part) for some in (base, sibling)]
        stored = [weight_shapes(some.part(part)) for some in (base, sibling)]
        if classes[0] != classes[1] or stored[0] != stored[1]:
            raise Refused(f"its {part} is another one than the base's: captions mean other numbers")
    check_drawn_size(recipe.evaluate, sibling)
    check_guidance(recipe.evaluate.on_sibling, sibling, "evaluate.model.")


@dataclass(frozen=True)
class Measurement(Stage):
    """Models, measured on the prompts, the noise and the data of an evaluation."""

    data: EvalInputs
    run: RunJob = field(default=run_job, kw_only=True)

    name = STAGE
    version = VERSION

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that affect pictures or metrics."""
        return settings_for_key(self.data.recipe, self.data.rounds)

    @property
    def parents(self) -> dict[str, Artifact]:
        """The reference data."""
        return {"images": self.data.images, "latents": self.data.latents}

    def runner(self, draft: Draft) -> RunJob:
        """What runs the jobs that draw: `run`, or hosts of the recipe's cluster. Raises Refused."""
        hosts = Hosts.of(self.data.recipe, STAGE)
        return self.run if hosts is None else DrawOnHosts(hosts, draft)

    def draw_on_sibling(
        self, models: Sequence[draw.EvalModel], draft: Draft, progress: Progress
    ) -> list[tuple[Shard, ...]]:
        """Each model's pictures on the sibling, of each round; nothing without a sibling."""
        sibling = self.data.measuring.sibling
        if sibling is None:
            return []
        moved = [model.on(sibling) for model in models]
        specs = sibling_specs(self.data)
        shards = (draw.draw(moved, spec, draft, self.runner(draft), progress) for spec in specs)
        return [*zip(*shards, strict=True)]

    def write(
        self,
        draft: Draft,
        suite: measure.MetricSuite,
        drawn: Mapping[str, Sequence[Shard]],
        measured: Mapping[str, Estimates],
        facts: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Add the metrics and all shards to the draft; returns the summary.

        Args:
            drawn: model -> its pictures of each round.
            measured: model -> its metrics.
            facts: what metrics.json has besides the metrics.
        """
        for shard in [*chain(*drawn.values()), *suite.shards]:
            draft.add_shard(shard)
        draft.write(BOOTSTRAP, to_npz(measured))
        by_name = metrics_by_name(measured)
        facts = {"metrics": by_name, **facts, "fingerprint": fingerprint(self.data)}
        draft.write(METRICS, json.dumps(facts, indent=1, allow_nan=False).encode())
        keys = {model: first.key for model, (first, *_) in drawn.items()}
        run_facts = runtime_facts(self.data.recipe.runtime)
        counts = {"pictures": len(suite.prompts), "rounds": self.data.rounds, "drawn": keys}
        return {**counts, **facts, "run": run_facts}


@dataclass(frozen=True)
class EvaluateStage(Measurement):
    """The base and the tuned model, measured on equal prompts and noise."""

    trained: Artifact

    @property
    def inputs(self) -> dict[str, str]:
        """Both models, those that measure, and the reference data."""
        return self.data.digests() | {"model": self.trained.digest}

    @property
    def parents(self) -> dict[str, Artifact]:
        """The reference data and the trained weights."""
        return super().parents | {"model": self.trained}

    @measure.memory_released()
    def build(self, draft: Draft, progress: Progress) -> dict[str, Any]:
        """Sample with both models, and write metrics, pictures and the grid into the draft."""
        data = self.data
        specs = sampling_specs(data)
        store = draft.store
        if specs[0].job.latents is None:
            log.warning(
                "evaluate: no held-out picture (encode.holdout): no holdout_loss, no distances"
            )
        cuts = tell_cut_prompts(STAGE, data.base, [p for s in specs for p in s.job.prompts])
        with local_weights(self.trained) as weights:
            models = [data.model(), data.model(self.trained, weights)]
            run = self.runner(draft)
            shards = [draw.draw(models, spec, draft, run, progress) for spec in specs]
            moved = self.draw_on_sibling(models, draft, progress)
        drawn = dict(zip(MODELS, zip(*shards, strict=True), strict=True))
        suite = measure.MetricSuite.of(data, store, progress)
        log.info("evaluate: measuring %d pictures per model", len(suite.prompts))
        base = suite.measure(store, drawn["base"], "base", progress)
        tuned = suite.measure(store, drawn["tuned"], "tuned model", progress)
        measured = {"base": base.metrics, "tuned": tuned.metrics}
        for model, rounds in zip(MODELS, moved, strict=False):
            name = f"{model}{metrics.SIBLING}"
            drawn[name] = rounds
            on_sibling = suite.measure(store, rounds, name, progress).metrics
            measured[model] = {**measured[model], **metrics.on_sibling(on_sibling)}
        _check_finite(measured)
        levels = {
            model: metrics.losses_by_level(draw.read_losses(store, drawn[model][0]))
            for model in MODELS
        }
        if not same_loss(data, models[0]):
            del levels["base"]
            log.info("evaluate: the base predicts another quantity: no %s of it", HOLDOUT_LOSS)
            known = measured["base"].items()
            measured["base"] = {n: e for n, e in known if not n.startswith(HOLDOUT_LOSS)}
        rows = {model: drawn[model] for model in MODELS}
        draft.write(GRID, _grid(store, rows, suite.rounds[0], data.files))
        compared = differences(measured["tuned"], measured["base"])
        facts = {
            "differences": {name: {"base": estimate} for name, estimate in compared.items()},
            "memorization": self._memorization(suite, drawn["tuned"], tuned, draft),
            **({LEVELS: levels} if levels["tuned"] else {}),
        }
        named = {"cut": cuts, "measured_by": measured_by(data.recipe)}
        named |= _write_beside(draft, suite.rounds[0], data.files)
        return self.write(draft, suite, drawn, measured, facts) | named

    def _memorization(
        self,
        suite: measure.MetricSuite,
        drawn: Sequence[Shard],
        tuned: measure.Measured,
        draft: Draft,
    ) -> dict[str, Any]:
        """The facts of the search for training pictures; the closest pairs are drawn."""
        facts = suite.memorization_facts()
        if tuned.nearest is None:
            return facts
        pairs = closest_pairs(tuned.nearest, suite.training["image"])
        parts = self.data.recipe.by_source
        factor = open_latents(self.data.latents.uri).info["size_step"]
        wanted = {(pair.tar, pair.key) for pair in pairs}
        training: dict[tuple[str, str], Any] = {}
        for source, pictures in self.data.training.by_source.items():
            settings = TransformSettings.of(parts[source])
            training |= find_pictures(pictures.images, wanted, settings, factor)
        samples = draw.read_chosen(draft.store, {pair.sample for pair in pairs}, *drawn)
        shown = [(pair, samples[pair.sample], training[pair.tar, pair.key]) for pair in pairs]
        draft.write(PAIRS, render_pairs(shown))
        prompts = metrics.all_prompts(*suite.rounds)
        closest = [{**vars(pair), "prompt": prompts[pair.sample].text} for pair in pairs]
        return {**facts, "closest_pairs": closest}

    def facts(self, summary: dict[str, Any]) -> dict[str, Any]:
        """The metrics of both models, and their differences."""
        return compared_metrics(summary)

    @staticmethod
    def show(artifact: Artifact, champion: Artifact | None = None) -> list[Panel]:
        """The pictures of all models side by side, the metrics, and the pairs closest to copies.

        Args:
            champion: a comparable evaluation of the champion.
        """
        measured = artifact.summary["metrics"]
        compared = artifact.summary["differences"]
        if champion is not None:
            own = champion.summary["metrics"]
            theirs = {n: {"champion": own[n]["tuned"]} for n in own if "tuned" in own[n]}
            measured = {n: m | theirs.get(n, {}) for n, m in measured.items()}
            tuned = (read_estimates(evaluated)["tuned"] for evaluated in (artifact, champion))
            paired = differences(*tuned)
            compared = {
                n: m | ({"champion": paired[n]} if n in paired else {}) for n, m in compared.items()
            }
        panels: list[Panel] = [
            compare_pictures(artifact, champion),
            Chart("Metrics", intervals_chart(measured, metrics.lower_is_better)),
            Table(
                "Metrics and paired differences, with 95% confidence intervals",
                metrics.metric_rows(measured, compared),
            ),
        ]
        if levels := artifact.summary.get(LEVELS):
            heading = "Held-out loss by source and noise level, from the least noise to the most"
            panels.append(Table(heading, metrics.level_rows(levels)))
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


def metrics_by_name(models: Mapping[str, Estimates]) -> dict[str, dict[str, Metric]]:
    """Metric name -> model -> metric, as in metrics.json."""
    names = dict.fromkeys(name for estimates in models.values() for name in estimates)
    return {
        name: {model: own[name].metric() for model, own in models.items() if name in own}
        for name in names
    }


def read_estimates(evaluated: Artifact, models: Sequence[str] = MODELS) -> dict[str, Estimates]:
    """Model -> its metrics, for some models of an evaluation."""
    measured = json.loads(evaluated.read(METRICS))["metrics"]
    resampled = evaluated.read(BOOTSTRAP)
    return {model: metrics.with_ranges(from_npz(resampled, measured, model)) for model in models}


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


def _shown(sets: metrics.PromptSets, limit: int = draw.COLUMNS) -> dict[str, list[int]]:
    """Prompt set name -> the number of the first picture of each prompt."""
    return {
        name: [numbers[0] + number for number in draw.choose(sets[name], limit)]
        for name, numbers in metrics.pictures_by_set(sets).items()
    }


def _write_beside(draft: Draft, sets: metrics.PromptSets, files: edits.Files) -> dict[str, Any]:
    """Write references and targets of the pictures that are shown, and name them for a summary."""
    prompts = metrics.all_prompts(sets)
    if not files:
        return {}
    named: dict[str, dict[str, dict[str, str]]] = {}
    for name, numbers in _shown(sets, draw.SHOWN).items():
        named[name] = {}
        for number in numbers:
            pictures = edits.beside(prompts[number], files)
            named[name][str(number)] = kinds = {}
            for kind, picture in pictures.items():
                kinds[kind] = f"{draw.BESIDE_FOLDER}/{number:05d}-{kind}.png"
                draft.write(kinds[kind], to_png(Image.fromarray(picture)))
    return {draw.BESIDE_FOLDER: named, "prompts": texts_of(sets)}


def _grid(
    store: Store,
    rounds: Mapping[str, Sequence[Shard]],
    sets: metrics.PromptSets,
    files: edits.Files,
) -> bytes:
    """The first picture of each prompt of the first round, with its references and target."""
    prompts = metrics.all_prompts(sets)
    chosen = _shown(sets)
    wanted = {number for numbers in chosen.values() for number in numbers}
    drawn = {name: draw.read_chosen(store, wanted, first) for name, (first, *_) in rounds.items()}
    columns: dict[str, list[draw.Column]] = {
        name: [(prompts[n].text, _column(prompts[n], n, drawn, files)) for n in numbers]
        for name, numbers in chosen.items()
    }
    return draw.render(columns)


def _column(
    prompt: edits.Prompt,
    number: int,
    drawn: Mapping[str, Mapping[int, edits.Picture]],
    files: edits.Files,
) -> dict[str, edits.Picture]:
    pictures = {model: shown[number] for model, shown in drawn.items()}
    return pictures | edits.beside(prompt, files)
