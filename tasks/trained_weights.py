"""The weights of a training, as local folders: pipeline parts or LoRA adapters."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from artifacts.records import Damaged, first_fault, open_checked
from artifacts.store import Artifact
from runtimes.adapters.lora import LORA_WEIGHTS
from runtimes.objective.noise_schedule import SCHEDULER_FILE
from runtimes.process.job import Drawing


@dataclass(frozen=True)
class TrainedWeights:
    """Parts that replace the base's parts, and LoRA adapters. Both empty: the base itself."""

    parts: dict[str, Path] = field(default_factory=dict)  # unet, text_encoder, ... -> folder
    lora: Path | None = None  # adapter file in diffusers' format

    def drawing(self, out: Path) -> Drawing:
        """A generate job's part that samples with these weights to a folder."""
        parts = {name: str(folder) for name, folder in self.parts.items()}
        return Drawing(str(out), parts, None if self.lora is None else str(self.lora))


BASE = TrainedWeights()


@contextmanager
def local_weights(trained: Artifact) -> Iterator[TrainedWeights]:
    """The weights of a train artifact: in place for a local store, else in a temporary copy.

    Raises Damaged: their bytes are not those that were committed.
    """
    fs = trained.store.fs
    kept = set(_weights(trained))
    entries = [entry for entry in trained.files if entry.path in kept]
    if trained.store.is_local:
        fault = first_fault(fs, trained.path, entries, deep=True)
        if fault is not None:
            raise Damaged(f"{trained.uri}: {fault}; run again")
        yield _tuned(Path(trained.path), trained)
        return
    with tempfile.TemporaryDirectory(prefix="kiln-tuned-") as folder:
        for entry in entries:
            target = Path(folder) / entry.path
            target.parent.mkdir(parents=True, exist_ok=True)
            url = trained.url(entry.path)
            with open_checked(url, entry.sha256) as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy, 2**22)
        yield _tuned(Path(folder), trained)


def weights_content(trained: Artifact) -> list[Any]:
    """Path, size and sha256 of each artifact file that affects the pictures."""
    kept = set(_weights(trained))
    return [entry.content() for entry in trained.files if entry.path in kept]


def _weights(trained: Artifact) -> list[str]:
    """Paths of all files that sampling reads: adapters, and parts with their configs."""
    paths = [entry.path for entry in trained.files]
    configs = (path for path in paths if path.endswith(("/config.json", f"/{SCHEDULER_FILE}")))
    parts = {path.rpartition("/")[0] for path in configs}
    return [path for path in paths if path == LORA_WEIGHTS or path.rpartition("/")[0] in parts]


def _tuned(folder: Path, trained: Artifact) -> TrainedWeights:
    paths = _weights(trained)
    names = sorted({path.partition("/")[0] for path in paths if "/" in path})
    lora = folder / LORA_WEIGHTS if LORA_WEIGHTS in paths else None
    return TrainedWeights({name: folder / name for name in names}, lora)
