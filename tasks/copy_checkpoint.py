"""Continue a finished training run with more steps: copy its newest and its best checkpoint."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from fsspec import AbstractFileSystem

from artifacts.filesystems import entries, name_of, subfolders
from artifacts.remote_stores import refusals
from artifacts.store import MANIFEST, Artifact, Draft, Store
from configs.settings.train import Train
from runtimes.train.measurements import CheckpointRanking

#: Settings without effect on the weights of a step, unless Train.weights_depend_on_steps.
STEPS = ("steps", "epochs")
log = logging.getLogger("kiln")


def copy_checkpoint(draft: Draft, settings: Train) -> None:
    """Copy the newest checkpoint, within the steps, of finished runs that differ in steps alone.

    With a rule for the best checkpoint, copy that one too. A newest checkpoint whose best one is
    deleted does not count. A draft with checkpoints of its own keeps them. The weights of a step
    must not depend on the number of steps.
    """
    fs, ours = draft.store.fs, draft.parts
    if _checkpoint_folders(fs, draft.path):
        return
    found: dict[int, str] = {}
    for artifact in _artifacts(draft.store, ours.stage):
        theirs = {name: artifact.manifest.get(name) for name in ours.as_dict()}
        if _without_steps(theirs) == _without_steps(ours.as_dict()):
            found |= _checkpoint_folders(fs, artifact.path)
    for step in sorted((step for step in found if step <= settings.steps), reverse=True):
        try:
            best = _best_of(fs, found[step], settings) or step
        except (FileNotFoundError, KeyError, ValueError) as error:  # gc may delete it meanwhile
            log.warning("%s: checkpoint %s is skipped: %s", ours.stage, found[step], error)
            continue
        if best not in found:
            continue
        log.info("%s: continuing a run of other steps from its step %d", ours.stage, step)
        with suppress(FileNotFoundError):  # `kiln gc` deletes checkpoints of finished runs
            for copied in sorted({best, step}):  # the newest last: a resume from it needs the best
                _copy_folder(fs, found[copied], f"{draft.path}/checkpoints")
        return


def _best_of(fs: AbstractFileSystem, folder: str, settings: Train) -> int | None:
    """The best step up to a checkpoint, by the rule; None without a rule or a score."""
    if settings.best_checkpoint is None:
        return None
    with refusals():
        history = fs.cat_file(f"{folder}/history.jsonl").decode().splitlines()
    return next(iter(CheckpointRanking(settings).best_first(history)), None)


def _copy_folder(fs: AbstractFileSystem, source: str, parent: str) -> None:
    folder = f"{parent}/{source.rpartition('/')[2]}"
    fs.makedirs(folder, exist_ok=True)
    names = (str(path).rpartition("/")[2] for path in fs.ls(source, detail=False))
    for name in sorted(names, key=lambda name: (name == MANIFEST, name)):  # the manifest commits
        fs.cp_file(f"{source}/{name}", f"{folder}/{name}")


def _artifacts(store: Store, stage: str) -> Iterator[Artifact]:
    """The artifacts of a stage with a readable manifest."""
    for key in subfolders(store.fs, f"{store.root}/{stage}"):
        with suppress(ValueError):
            if (artifact := store.load(stage, key)) is not None:
                yield artifact


def _checkpoint_folders(fs: AbstractFileSystem, path: str) -> dict[int, str]:
    """Folders of the committed checkpoints in a run's folder, by step."""
    names = subfolders(fs, f"{path}/checkpoints")
    steps = {int(m[1]): m[0] for name in names if (m := re.fullmatch(r"step-(\d+)", name))}
    folders = {step: f"{path}/checkpoints/{name}" for step, name in steps.items()}
    return {n: f for n, f in folders.items() if MANIFEST in map(name_of, entries(fs, f))}


def _without_steps(parts: dict[str, Any]) -> dict[str, Any]:
    settings = dict(parts["settings"] or {})
    return {**parts, "settings": {n: v for n, v in settings.items() if n not in STEPS}}
