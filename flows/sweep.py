"""The flow `sweep`: one data set per captioner, a training per trial, and the best to the gate."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from prefect import flow, runtime

from artifacts.errors import retrying
from artifacts.latent_shards import open_latents
from configs.errors import Failed, UserError
from configs.load_recipe import Trial, load_trials
from configs.secrets import one_line, redacted_errors
from configs.settings.caption import Caption
from flows import flow_process, task_limits
from flows.finetune import INPUTS, evaluate, final_state, publish, report_of, stages_of, train
from flows.run import Run, prepare, stages_until
from flows.send_stage import run_task
from tasks import compare_sweep_trials
from tasks.build_or_reuse import failing
from tasks.evaluate.metrics import most_rounds
from tasks.panels import Panel
from tasks.progress import artifact_key, show_in_prefect, stage_links

log = logging.getLogger("kiln")


@flow(name="sweep", flow_run_name=task_limits.run_name("sweep {recipe}"))
def sweep(
    recipe: task_limits.RecipeName = "digits",
    overrides: task_limits.Overrides = task_limits.NO_OVERRIDES,
) -> Any:
    """Train and evaluate a recipe with several values of its settings; publish the best model.

    Args:
        recipe: Name or path of a recipe.
        overrides: Dotted settings to change, such as {"sweep.values": {"train.seed": [0, 1]}}.

    Returns a report (as `kiln sweep --json` prints it): `trials`, the number of the `best` one, and
    what `finetune` reports of it.
    """
    flow_process.prepare_process()
    run_id = runtime.flow_run.id
    with redacted_errors():
        trials = load_trials(recipe, task_limits.revealed(overrides))
        flow_process.name_run(trials[0].recipe.publish.name)
        runs = prepared(trials, run_id)
        compare_sweep_trials.check_metric(runs[0].recipe)
        compare_sweep_trials.check_comparable([run.recipe for run in runs], runs[0].base)
        return _sweep(trials, runs)


def prepared(trials: Sequence[Trial], run_id: str) -> list[Run]:
    """The checked trials, as `prepare` raises; a warning that concerns several is logged once."""
    with flow_process.each_line_once():
        return [prepare(trial.recipe, run_id=run_id) for trial in trials]


def _sweep(trials: Sequence[Trial], runs: Sequence[Run]) -> Any:
    first = replace(runs[0], trials=[run.recipe for run in runs])
    settings = first.recipe.sweep
    data = [*islice(stages_of(first), len(stages_until(first.recipe, "encode")))]
    captioned = [(first.recipe.caption, data)]
    latents = data[-1]
    with failing(compare_sweep_trials.STAGE):
        opened = retrying(lambda: open_latents(latents.result().load(first.store).uri))
        compare_sweep_trials.check_metric(first.recipe, held_out=opened.held_out)
    outcomes: list[dict[str, Any]] = []
    measured: dict[int, list[Any]] = {}
    used: dict[int, list[Any]] = {}
    for number, (trial, run) in enumerate(zip(trials, runs, strict=True)):
        log.info("sweep: trial %d of %d: %s", number + 1, len(trials), trial.label)
        outcome, used[number], measured[number] = _try(number + 1, trial, run, captioned)
        outcomes.append(outcome)
        _show(first, outcomes, {"trials": f"{number + 1} of {len(trials)}"})
    best = compare_sweep_trials.choose_best(outcomes, settings)
    if best is None:
        raise Failed(f"sweep: all trials failed, the first one: {outcomes[0]['error']}")
    winner = runs[best]
    images, *_, latents = data = used[best]
    if most_rounds(winner.recipe.evaluate) > 1:  # the trials were compared on one round each
        trained, _ = measured[best]
        measured[best][1] = run_task(evaluate, winner, images, latents, trained)
    made = {state.result().stage: state for state in (*data, *measured[best])}
    published = run_task(publish, winner, *map(made.get, INPUTS["publish"]))
    report = report_of([stage.result() for stage in (*data, *measured[best], published)])
    report |= {"sweep": settings.model_dump(mode="json"), "trials": outcomes, "best": best + 1}
    facts = {"trials": len(trials), "best": trials[best].label, "status": report["status"]}
    _show(first, outcomes, facts | ({"model": report["model"]} if report["model"] else {}))
    return final_state(report, published)


#: The section `caption` of trials, and the final states of their stages up to encode.
Captioned = list[tuple[Caption | None, list[Any]]]


def _data_of(run: Run, captioned: Captioned) -> list[Any]:
    """The final states of a trial's stages up to encode; captions are made once."""
    for caption, data in captioned:
        if caption == run.recipe.caption:
            return data
    stages = stages_until(run.recipe, "encode")
    states = zip(stages, captioned[0][1], strict=True)
    # The stages of a mixture's sources are reused from the store.
    own = run.recipe.stages if run.recipe.sources else ("caption", "encode")
    shared = {stage: state for stage, state in states if stage not in own}
    data = [*islice(stages_of(run, done=shared), len(stages))]
    captioned.append((run.recipe.caption, data))
    return data


def _try(
    number: int, trial: Trial, run: Run, captioned: Captioned
) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """Train and evaluate a trial, with its captions.

    Returns its outcome, and unless it failed, the final states up to encode and of its own stages.
    """
    outcome: dict[str, Any] = {"label": trial.label, "settings": trial.settings}
    outcome |= {"status": "failed", "error": None, "metrics": {}, "curve": [], "stages": {}}
    rounds = most_rounds(run.recipe.evaluate)
    try:
        data = images, *_, latents = _data_of(run, captioned)
        trained = run_task(train, run, latents, name=f"train {number}")
        compared = run
        if rounds > 1:
            compared = replace(run, stages=stages_until(run.recipe, "evaluate"))
        name = f"evaluate {number}"
        evaluated = run_task(evaluate, compared, images, latents, trained, name=name)
        report = report_of([trained.result(), evaluated.result()])
        metrics = compare_sweep_trials.tuned_metrics(report["metrics"], run.recipe.sweep)
        curve = retrying(lambda: compare_sweep_trials.read_curve(trained.result().load(run.store)))
    except Exception as error:  # a failed trial does not end the others
        # The message of our own error says what to do; any other error is a bug.
        text = one_line(error)
        log.warning(
            "sweep: trial %d failed: %s", number, text, exc_info=not isinstance(error, UserError)
        )
        return outcome | {"error": text}, [], []
    measurement = {"metrics": metrics, "curve": curve, "stages": report["stages"]}
    return outcome | measurement | {"status": "measured"}, data, [trained, evaluated]


def _show(run: Run, outcomes: Sequence[dict[str, Any]], facts: dict[str, Any]) -> None:
    settings = run.recipe.sweep
    facts = {**facts, "metric": f"{settings.metric} ({compare_sweep_trials.mode_of(settings)})"}
    built = {*stages_until(run.recipe, "encode")}
    built.update(stage for outcome in outcomes for stage in outcome["stages"])
    every = run.recipe.stages
    stages = every if "status" in facts else [stage for stage in every if stage in built]

    def panels() -> list[Panel]:
        return [
            *compare_sweep_trials.show(outcomes, settings, facts),
            stage_links(run.model_name, stages),
        ]

    show_in_prefect(
        artifact_key(run.model_name, compare_sweep_trials.STAGE), f"{run.model_name}: sweep", panels
    )
