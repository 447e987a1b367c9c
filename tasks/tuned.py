"""What training has left, as folders on this machine: parts of a pipeline, or adapters."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from artifacts.store import Artifact
from runtimes.adapters.lora import LORA_WEIGHTS
from runtimes.objective.noise_scheduler import SCHEDULER_FILE


@dataclass(frozen=True)
class Tuned:
    """What takes the place of the base's parts, or is laid over them; nothing is the base."""

    parts: dict[str, Path] = field(default_factory=dict)  # unet, text_encoder, ... -> folder
    lora: Path | None = None  # adapters in diffusers' format

    def part_names(self) -> dict[str, str]:
        """The parts' folders as a job names them."""
        return {name: str(folder) for name, folder in self.parts.items()}

    def lora_name(self) -> str | None:
        """The adapters' file as a job names it."""
        return None if self.lora is None else str(self.lora)


BASE = Tuned()


@contextmanager
def local_tuned(trained: Artifact) -> Iterator[Tuned]:
    """The trained weights on this machine: where they are if that is local, else copied."""
    if trained.store.is_local:
        yield _tuned(Path(trained.path), trained)
        return
    with tempfile.TemporaryDirectory(prefix="kiln-tuned-") as folder:
        for path in _weights(trained):
            target = Path(folder) / path
            target.parent.mkdir(parents=True, exist_ok=True)
            trained.store.fs.get_file(f"{trained.path}/{path}", str(target))
        yield _tuned(Path(folder), trained)


def tuned_content(trained: Artifact) -> list[Any]:
    """What of the artifact changes the pictures: path, size and sha256 of each file of weights."""
    kept = set(_weights(trained))
    return [entry.content() for entry in trained.files if entry.path in kept]


def _weights(trained: Artifact) -> list[str]:
    """Paths of everything that takes part in drawing."""
    paths = [entry.path for entry in trained.files]
    configs = (path for path in paths if path.endswith(("/config.json", f"/{SCHEDULER_FILE}")))
    parts = {path.rpartition("/")[0] for path in configs}
    return [path for path in paths if path == LORA_WEIGHTS or path.rpartition("/")[0] in parts]


def _tuned(folder: Path, trained: Artifact) -> Tuned:
    paths = _weights(trained)
    names = sorted({path.partition("/")[0] for path in paths if "/" in path})
    lora = folder / LORA_WEIGHTS if LORA_WEIGHTS in paths else None
    return Tuned({name: folder / name for name in names}, lora)
