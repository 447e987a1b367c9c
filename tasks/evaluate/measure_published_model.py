"""Metrics of a published model, comparable with an evaluation's: read, or measured again."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from artifacts.models import resolve_model
from artifacts.records import read_checked, read_record
from artifacts.remote_stores import is_forbidden, is_outage
from artifacts.store import MANIFEST, Artifact, Draft, KeyParts, Store
from tasks.build_or_reuse import build_or_reuse, runtime_facts, storing
from tasks.child_process import run_job
from tasks.evaluate import draw_pictures
from tasks.evaluate.bootstrap import Estimates, from_npz, to_npz
from tasks.evaluate.comparable_metrics import VERSION, fingerprint, same_loss, sampling_spec
from tasks.evaluate.draw_pictures import STAGE, EvalModel, RunJob
from tasks.evaluate.evaluation_inputs import EvalInputs
from tasks.evaluate.load_published_model import load_published_model
from tasks.evaluate.measure_models import MetricSuite, memory_released
from tasks.evaluate.metric_names import with_ranges
from tasks.evaluate.stage import metrics_by_name, read_estimates, settings_for_key
from tasks.progress import Progress
from tasks.result_files import BOOTSTRAP, METRICS

log = logging.getLogger("kiln")


class PublishedMetrics(NamedTuple):
    """A published model's metrics, and the artifact with them if it was measured again."""

    estimates: Estimates
    evaluation: Artifact | None = None


def metrics_of_published(
    given: EvalInputs,
    evaluated: Artifact,
    begin: Callable[[KeyParts], Progress],
    uri: str,
    *,
    send: Callable[[KeyParts, Progress], Callable[[], str] | None] | None = None,
    run: RunJob = run_job,
) -> PublishedMetrics:
    """A published model's metrics, comparable with the `tuned` ones of an evaluation.

    The metrics of its own publication are reused if their fingerprint is equal; its weights are
    then not read. Otherwise the model samples again, as an artifact of its own. The held-out loss
    is then omitted if the model predicts another quantity or has other inputs.

    Args:
        evaluated: artifact of the evaluation.
        begin: records that the run needs an artifact; returns the progress of building it.
        uri: folder or URL of the published model.
        send: returns a call that lets another machine build an artifact, or None to build it here.
    """
    found = published_estimates(uri, evaluated.summary["fingerprint"])
    if found is not None:
        return PublishedMetrics(found)
    log.info("evaluate: the champion has no comparable metrics: measuring it again")
    model = load_published_model(resolve_model(uri))
    # The fingerprint has what ours must share with it, such as the prediction type of the loss.
    shared = {"published": model.digest, "comparable": fingerprint(given)}
    inputs = given.digests() | shared
    parts = KeyParts(STAGE, VERSION, settings_for_key(given.recipe), inputs)
    progress = begin(parts)
    build = partial(_build_published, given, model, progress=progress, run=run)
    parents = {"images": given.images, "latents": given.latents}
    sent = None if send is None else send(parts, progress)
    result = build_or_reuse(evaluated.store, parts, build, parents=parents, send=sent)
    artifact = result.load(evaluated.store)
    return PublishedMetrics(read_estimates(artifact, ("tuned",))["tuned"], artifact)


@memory_released()
def _build_published(
    given: EvalInputs, model: EvalModel, draft: Draft, progress: Progress, run: RunJob
) -> dict[str, Any]:
    """Sample with a published model, and write its finite metrics, as `tuned`, into the draft.

    A rule that names another metric then has no comparable value, and fails unless it is forced.
    """
    spec, store = sampling_spec(given), draft.store
    if not same_loss(given, model):
        spec = replace(spec, latents=None)  # the model may not even accept our latents
    with draw_pictures.scratch(draft) as folder:
        on_event = draw_pictures.progress_callback(progress)
        (shard,) = draw_pictures.draw([model], spec, store, folder, run, on_event)
    suite = MetricSuite.of(given, store, progress)
    models = {"tuned": _finite(suite.measure(store, shard, "champion", progress).metrics)}
    for one in [shard, *suite.shards]:
        draft.add_shard(one)
    draft.write(BOOTSTRAP, to_npz(models))
    facts = {"metrics": metrics_by_name(models), "fingerprint": fingerprint(given)}
    draft.write(METRICS, json.dumps(facts, indent=1, allow_nan=False).encode())
    run_facts = runtime_facts(given.recipe.runtime)
    return {"pictures": len(spec.prompts), "drawn": {"tuned": shard.key}, **facts, "run": run_facts}


def _finite(estimates: Estimates) -> Estimates:
    """The metrics of a champion that have a value; a warning names the others."""
    found = {name: one for name, one in estimates.items() if np.isfinite(one.value)}
    if lost := sorted(estimates.keys() - found.keys()):
        log.warning("evaluate: the champion has no finite value of %s", ", ".join(lost))
    return found


def published_estimates(uri: str, fingerprint: str) -> Estimates | None:
    """The `tuned` metrics of a publication; None if they are missing, damaged or not comparable.

    Raises StorageError if a remote store does not give them.
    """
    place = Store(uri)
    fs, root = place.fs, place.root
    with storing(place):
        try:
            manifest = read_record(fs, f"{root}/{MANIFEST}")
            sha256 = {entry.path: entry.sha256 for entry in manifest["files"]} if manifest else {}
            found = json.loads(read_checked(fs, root, METRICS, sha256[METRICS]))
            if found["fingerprint"] != fingerprint:
                return None
            resampled = read_checked(fs, root, BOOTSTRAP, sha256[BOOTSTRAP])
            return with_ranges(from_npz(resampled, found["metrics"], "tuned"))
        except (OSError, ValueError, KeyError) as error:
            if is_outage(error) or is_forbidden(error):
                raise
            return None
