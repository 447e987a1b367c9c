"""Continue a finished training run with more steps: copy its newest checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from fsspec import AbstractFileSystem

from artifacts.store import MANIFEST, Artifact, Draft, Store

#: Settings that the trained weights of a step do not depend on, at a constant learning rate.
STEPS = ("steps", "epochs")
log = logging.getLogger("kiln")


def copy_checkpoint(draft: Draft, steps: int) -> None:
    """Copy the newest checkpoint, up to `steps`, of finished runs that differ only in their steps.

    A draft with checkpoints of its own keeps them. The learning rate must be constant.
    """
    fs, recipe = draft.store.fs, draft.recipe
    if _checkpoint_folders(fs, draft.path):
        return
    found: dict[int, str] = {}
    for artifact in _artifacts(draft.store, recipe.stage):
        parts = {name: artifact.manifest.get(name) for name in recipe.as_dict()}
        if _without_steps(parts) == _without_steps(recipe.as_dict()):
            found |= _checkpoint_folders(fs, artifact.path)
    if (step := max((step for step in found if step <= steps), default=None)) is None:
        return
    log.info("%s: continuing a run of other steps from its step %d", recipe.stage, step)
    folder = f"{draft.path}/checkpoints/{found[step].rpartition('/')[2]}"
    fs.makedirs(folder, exist_ok=True)
    names = (str(path).rpartition("/")[2] for path in fs.ls(found[step], detail=False))
    for name in sorted(names, key=lambda name: (name == MANIFEST, name)):  # the manifest commits
        fs.cp_file(f"{found[step]}/{name}", f"{folder}/{name}")


def _artifacts(store: Store, stage: str) -> Iterator[Artifact]:
    """The artifacts of a stage with a readable manifest."""
    for manifest in store.fs.glob(f"{store.root}/{stage}/*/{MANIFEST}"):
        with suppress(ValueError):
            if (artifact := store.load(stage, str(manifest).split("/")[-2])) is not None:
                yield artifact


def _checkpoint_folders(fs: AbstractFileSystem, path: str) -> dict[int, str]:
    """Folders of the committed checkpoints in a run's folder, by step."""
    found = fs.glob(f"{path}/checkpoints/step-*/{MANIFEST}")
    folders = (str(manifest).rpartition("/")[0] for manifest in found)
    return {int(folder.rpartition("-")[2]): folder for folder in folders}


def _without_steps(parts: dict[str, Any]) -> dict[str, Any]:
    settings = dict(parts["settings"] or {})
    return {**parts, "settings": {n: v for n, v in settings.items() if n not in STEPS}}
