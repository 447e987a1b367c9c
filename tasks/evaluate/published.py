"""Published models in an evaluation: load them, and read or measure their metrics.

A published model is a full pipeline, or adapters and their base. A version of a registry has a
manifest: its files are compared with it before they are loaded. Its metrics must be comparable with
an evaluation's: they are read, or measured again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from fsspec.implementations.local import LocalFileSystem
from pydantic import ValidationError

from artifacts.errors import is_forbidden, is_outage
from artifacts.models import IGNORED, cache_folder, digest_model, digest_model_file, resolve_model
from artifacts.records import Damaged, digest_json, distrust, read_checked, read_record
from artifacts.store import MANIFEST, Artifact, Draft, Store
from configs.errors import Away, Refused
from configs.explain_errors import explain
from configs.settings.data import Encode
from configs.settings.recipe import Model
from runtimes.adapters import read_layouts
from runtimes.adapters.lora_files import LORA_WEIGHTS
from runtimes.pipeline_folder.folder import Base
from runtimes.pipeline_folder.single_file import resolve_base
from tasks import build_or_reuse as stage
from tasks.child_process import run_job
from tasks.evaluate import draw
from tasks.evaluate.distances import Estimates, from_npz
from tasks.evaluate.draw import EvalModel, RunJob, digest_eval_model, digest_pipeline
from tasks.evaluate.inputs import EvalInputs, fingerprint, same_loss, sampling_specs
from tasks.evaluate.measure import MetricSuite, memory_released
from tasks.evaluate.metrics import on_sibling, with_ranges
from tasks.evaluate.stage import Measurement, read_estimates
from tasks.progress import Progress
from tasks.trained_weights import TrainedWeights

#: The config of a published ControlNet; adapters have none.
CONTROL = "config.json"


def load_published_model(folder: Path) -> EvalModel:
    """The model in a local folder that the publish stage wrote.

    Raises:
        Damaged: a file differs from its manifest; a folder without a manifest is not checked.
        Refused, Away: the base of the adapters is missing, or does not answer now.
        Refused: the folder has neither a pipeline, adapters nor a ControlNet.
    """
    try:
        manifest = read_record(LocalFileSystem(), str(folder / MANIFEST))
    except Damaged:
        if (folder / stage.RECIPE).is_file():
            raise _damaged(folder, MANIFEST) from None
        manifest = None  # some other program's file of this name
    for entry in manifest["files"] if manifest else []:
        path = folder / entry.path
        if path.name in IGNORED:  # such as a card that was edited
            continue
        if not path.is_file() or digest_model_file(path) != entry.sha256:
            distrust(LocalFileSystem(), str(path))
            raise _damaged(folder, entry.path)
    model = find_parts(folder)
    return replace(model, digest=_digest(folder, model))


def find_parts(folder: Path) -> EvalModel:
    """As `load_published_model`, without reading the weights: the digest is empty."""
    sections = _section(folder, "evaluate"), _section(folder, "encode")
    reading = _reading(folder)
    if (folder / "model_index.json").is_file():
        base = Base.open(folder, **reading)
        return EvalModel("", base, TrainedWeights(_trained_texts(base), None), *sections)
    lora = folder / LORA_WEIGHTS
    has_control = (folder / CONTROL).is_file()
    if not lora.is_file() and not has_control:
        raise Refused(f"{folder}: neither a pipeline, adapters ({LORA_WEIGHTS}) nor a ControlNet")
    own = {name: folder / name for name in ("scheduler",) if (folder / name).is_dir()}
    base = replace(_base_of(folder), **reading)
    if has_control:
        return EvalModel("", base, TrainedWeights({**own, "controlnet": folder}), *sections)
    return EvalModel("", base, TrainedWeights(own, lora), *sections)


def is_complete_here(folder: Path) -> bool:
    """Whether nothing must be fetched: adapters need their base, which may be on the hub."""
    if (folder / "model_index.json").is_file():
        return True
    model = _base_settings(folder)
    named = [model.get("path"), model.get("vae")]
    return all(os.path.isdir(place) for place in named if isinstance(place, str))


def _damaged(folder: Path, path: str) -> Damaged:
    copied = folder.is_relative_to(cache_folder())
    first = f"delete this copy of the model ({folder}) and run again; or " if copied else ""
    return Damaged(
        f"{folder / path} is missing or damaged, its sha256 is not that of the manifest: {first}"
        "`kiln verify` lists what is damaged, `kiln run` of its recipe writes it again, and `kiln "
        "rollback` restores the champion before it"
    )


def _digest(folder: Path, model: EvalModel) -> str:
    if "controlnet" in model.weights.parts:
        files = [*folder.glob("*.safetensors"), folder / CONTROL]
        content = {path.name: digest_model_file(path) for path in sorted(files)}
        parts = tuple(name for name in model.weights.parts if name != "controlnet")
        content |= {"parts": digest_model(folder, parts)} if parts else {}
        return digest_eval_model(model.base, content)
    if model.weights.lora is not None:
        own = digest_model(folder, (LORA_WEIGHTS, *model.weights.parts))
        return digest_eval_model(model.base, own)
    pipeline = digest_pipeline(model.base)
    texts = tuple(model.weights.parts)
    return digest_json({"pipeline": pipeline, "texts": texts}) if texts else pipeline


def _trained_texts(base: Base) -> dict[str, Path]:
    """The text encoders of a published pipeline that were trained.

    They also encode the held-out captions, so the loss differs from that with the embeddings stored
    in the latents. The digest must differ too.
    """
    if not _section(base.folder, "train").get("train_text_encoder"):
        return {}
    return {name: base.part(name) for name in base.family.clip_encoders}


def _reading(folder: Path) -> dict[str, Any]:
    """`Encode.reading` of the folder's recipe; that of a pipeline in diffusers without one."""
    encode = _section(folder, "encode")
    named = {name: encode[name] for name in ("max_tokens", "captions") if encode.get(name)}
    try:
        return Encode.model_validate(named).reading
    except ValidationError as error:
        raise Refused(explain(f"{folder}/{stage.RECIPE}: encode", error, named, Encode)) from None


def _section(folder: Path, name: str) -> dict[str, Any]:
    """A section of a published folder's recipe; empty without a recipe."""
    try:
        recipe = yaml.safe_load((folder / stage.RECIPE).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    section = recipe.get(name) if isinstance(recipe, dict) else None
    return section if isinstance(section, dict) else {}


def _base_settings(folder: Path) -> dict[str, Any]:
    """`model` in the recipe of adapters, from the manifest: it is never pushed and has paths."""
    with suppress(OSError, ValueError, KeyError, TypeError):  # none, or another program's
        record = read_record(LocalFileSystem(), str(folder / MANIFEST)) or {}
        return dict(record["settings"]["base"])
    return _section(folder, "model")


def _base_of(folder: Path) -> Base:
    """The base in the recipe of a folder's adapters."""
    try:
        model = _base_settings(folder)
        # A number names a descriptor to the operating system, and no file to us: Model refuses it.
        named = {name: model.get(name) for name in ("revision", "components")}
        path = resolve_base(Model(path=model["path"], **named))
        place = model.get("vae")
        vae = None if place is None else resolve_model(os.fspath(place))
    except (KeyError, TypeError, ValidationError):
        raise Refused(f"{folder}/{stage.RECIPE} does not name the base of its adapters") from None
    except (Refused, Away) as error:
        raise type(error)(f"{folder}: the base of its adapters is missing: {error}") from None
    return Base.open(path, vae)


log = logging.getLogger("kiln")


class PublishedMetrics(NamedTuple):
    """A published model's metrics, and the artifact with them if it was measured again."""

    estimates: Estimates
    evaluation: Artifact | None = None


def metrics_of_published(
    data: EvalInputs,
    evaluated: Artifact,
    build: Callable[[stage.Stage], stage.StageResult],
    uri: str,
    *,
    run: RunJob = run_job,
) -> PublishedMetrics:
    """A published model's metrics, comparable with the `tuned` ones of an evaluation.

    The metrics of its own publication are reused if their fingerprint is equal; its weights are
    then not read. Otherwise the model samples again, as an artifact of its own. The held-out loss
    is then omitted if the model predicts another quantity or has other inputs.

    Args:
        evaluated: artifact of the evaluation.
        build: builds or reuses a stage's artifact.
        uri: folder or URL of the published model.
    """
    published = published_estimates(uri, evaluated.summary["fingerprint"])
    if published is not None:
        return PublishedMetrics(published)
    log.info("evaluate: the champion has no comparable metrics: measuring it again")
    model = load_published_model(resolve_model(uri))
    artifact = build(ChampionEvaluation(data, model, run=run)).load(evaluated.store)
    return PublishedMetrics(read_estimates(artifact, ("tuned",))["tuned"], artifact)


@dataclass(frozen=True)
class ChampionEvaluation(Measurement):
    """A published model, measured as the tuned one of an evaluation."""

    model: EvalModel

    @property
    def inputs(self) -> dict[str, str]:
        """The model, and what its metrics must share with the evaluation.

        That is more than the data, such as the prediction type of the loss.
        """
        shared = {"published": self.model.digest, "comparable": fingerprint(self.data)}
        return self.data.digests() | shared

    @memory_released()
    def build(self, draft: Draft, progress: Progress) -> dict[str, Any]:
        """Sample with the model, and write its finite metrics, as `tuned`, into the draft.

        A rule that names another metric then has no comparable value, and fails unless it is
        forced.
        """
        specs = sampling_specs(self.data)
        if not same_loss(self.data, self.model):
            # The model may not even accept our latents.
            specs[0] = replace(specs[0], job=replace(specs[0].job, latents=None, holdout={}))
        run = self.runner(draft)
        drawn = [*chain(*(draw.draw([self.model], s, draft, run, progress) for s in specs))]
        moved = self.draw_on_sibling([self.model], draft, progress) if self._fits_sibling() else []
        suite = MetricSuite.of(self.data, draft.store, progress)
        metrics = suite.measure(draft.store, drawn, "champion", progress).metrics
        for rounds in moved:
            there = suite.measure(draft.store, rounds, "champion on the sibling", progress)
            metrics |= on_sibling(there.metrics)
        finite = {name: metric for name, metric in metrics.items() if np.isfinite(metric.value)}
        if lost := sorted(metrics.keys() - finite.keys()):
            log.warning("evaluate: the champion has no finite value of %s", ", ".join(lost))
        pictures = {"tuned": drawn, **on_sibling(dict(zip(("tuned",), moved, strict=False)))}
        return self.write(draft, suite, pictures, {"tuned": finite}, {})

    def _fits_sibling(self) -> bool:
        """Whether the model has adapters, and the sibling their layers: its base may be another."""
        lora, sibling = self.model.weights.lora, self.data.measuring.sibling
        if lora is None or sibling is None:
            return False
        try:
            read_layouts.read_file(lora, sibling, str(lora))
        except Refused as error:
            log.warning("evaluate: the champion is not measured on evaluate.model: %s", error)
            return False
        return True


def published_estimates(uri: str, fingerprint: str) -> Estimates | None:
    """The `tuned` metrics of a publication; None if they are missing, damaged or not comparable.

    Raises Failed if a remote store does not give them.
    """
    place = Store(uri)
    read = partial(read_checked, place.fs, place.root)
    with stage.storing(place):
        try:
            manifest = read_record(place.fs, f"{place.root}/{MANIFEST}")
            sha256 = {entry.path: entry.sha256 for entry in manifest["files"]} if manifest else {}
            metrics = json.loads(read(stage.METRICS, sha256[stage.METRICS]))
            if metrics["fingerprint"] != fingerprint:
                return None
            resampled = read(stage.BOOTSTRAP, sha256[stage.BOOTSTRAP])
            return with_ranges(from_npz(resampled, metrics["metrics"], "tuned"))
        except (OSError, ValueError, KeyError) as error:
            if is_outage(error) or is_forbidden(error):
                raise
            return None
