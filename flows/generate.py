"""The flow `generate`: prompts in, pictures out, by any model on any runtime."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from prefect import flow

from artifacts.store import Artifact, KeyParts, Store
from configs.generating import Generate, read_settings
from flows.logs import log_to_prefect
from flows.stages import run_stage
from tasks import generate as stage
from tasks.progress import Progress

log = logging.getLogger("kiln")


@flow(name="generate", flow_run_name="generate {model}")
def generate(
    model: str,
    prompts: list[str] | None = None,
    settings: dict[str, Any] | None = None,
    out: str = "outputs",
    skip_grid: bool = False,
    skip_save: bool = False,
) -> Any:
    """Draw prompts; what has been drawn before with the same settings is reused.

    Args:
        model: Name of a published model (`digits`, `digits@v2`), folder, hub id or URL.
        prompts: What to draw; or name a file of prompts in `settings`.
        settings: Anything else of configs/generating.py, such as {"n_samples": 2, "seed": 7}.
        out: Folder that pictures are copied into, below a name of their own.
        skip_grid: Leave out the grid.
        skip_save: Leave out the single pictures.

    Returns where they are: `folder`, `pictures`, `seconds`, `first_seconds`, `compile_seconds`.
    """
    log_to_prefect()
    return _run(read_settings(model, prompts, settings), Path(out), not skip_grid, not skip_save)


def _run(settings: Generate, out: Path, grid: bool, samples: bool) -> dict[str, Any]:
    painter = stage.find_painter(settings)
    stage.check(settings, painter)
    store = Store(settings.store)
    parts = KeyParts(
        stage.STAGE, stage.VERSION, stage.settings_for_key(settings), {"model": painter.digest}
    )
    progress = Progress(stage.STAGE)
    result, artifact = run_stage(
        store, parts, lambda draft: stage.build(settings, painter, draft, progress), {}, stage.show
    )
    folder = out / artifact.key[:12]
    _copy(artifact, folder, grid, samples)
    log.info("generate: %d pictures in %s", artifact.summary["pictures"], folder)
    return {**artifact.summary, "folder": str(folder), "outcome": result.outcome}


def _copy(artifact: Artifact, folder: Path, grid: bool, samples: bool) -> None:
    """The artifact's files where they were asked for; the list says what each picture is."""
    folder.mkdir(parents=True, exist_ok=True)
    for entry in artifact.files:
        is_sample = entry.path.startswith("samples/")
        if (is_sample and not samples) or (entry.path == stage.GRID and not grid):
            continue
        target = folder / entry.path
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(artifact.read(entry.path))


def print_report(report: dict[str, Any], *, as_json: bool) -> None:
    """Where the pictures are, and how long they took."""
    if as_json:
        print(json.dumps(report), flush=True)
        return
    print(
        f"{report['pictures']} pictures, {report['outcome']}: {report['folder']} "
        f"({report['seconds']:.1f} s, {report['first_seconds']:.1f} s of it for the first batch; "
        f"{report['compile_seconds']:.1f} s of compiling before)"
    )
