"""The flow `generate`: sample pictures of prompts from any model on any runtime."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from prefect import flow, runtime, task
from prefect.cache_policies import NO_CACHE

from artifacts.store import Store
from configs.errors import Refused
from configs.secrets import redacted_errors
from configs.settings.generate import Generate, read_settings
from flows.flow_process import prepare_process
from flows.task_limits import revealed, run_name, stage_task
from tasks import generate as stage
from tasks.build_or_reuse import Builder, StageResult

log = logging.getLogger("kiln")


@dataclass(frozen=True)
class GenerateRun(Builder):
    """A run of the flow `generate`."""

    store: Store
    id: str
    stage: stage.GenerateStage

    @property
    def model_name(self) -> str:
        """The model, as a user names it."""
        return self.stage.options.model

    @property
    def facts(self) -> dict[str, Any]:
        """Settings and model, for `kiln ls`."""
        return {"settings": self.stage.parts.settings, "model": self.model_name}


@task(**stage_task("generate"))
@redacted_errors()
def draw(settings: Generate, run_id: str) -> StageResult:
    """Sample the pictures of all prompts."""
    model = stage.find_model(settings)
    settings = stage.with_sampler(settings, model)
    stage.check(settings, model)
    drawing = stage.GenerateStage(settings, model)
    run = GenerateRun(Store(settings.store), run_id, drawing)
    return run.ended(run.build(drawing), drawing.show)


@task(task_run_name="copy", cache_policy=NO_CACHE)
@redacted_errors()
def copy(settings: Generate, drawn: StageResult, out: Path, grid: bool, samples: bool) -> Any:
    """Copy the pictures, their index and a grid to a folder below `out`."""
    artifact = drawn.load(Store(settings.store))
    folder = out / artifact.key[:12]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / stage.LIST).write_bytes(artifact.read(stage.LIST))
    if samples:
        for name in stage.sample_names(artifact):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(artifact.read(name))
    if grid:
        columns = settings.grid_columns or settings.num_images_per_prompt
        (folder / "grid.png").write_bytes(stage.grid(artifact, columns))
    log.info("generate: %d pictures in %s", artifact.summary["pictures"], folder)
    return {**artifact.summary, "folder": str(folder), "outcome": drawn.outcome}


@flow(name="generate", flow_run_name=run_name("generate {model}"))
def generate(
    model: str,
    prompts: list[str] | None = None,
    settings: dict[str, Any] | None = None,
    out: str = "outputs",
    skip_grid: bool = False,
    skip_save: bool = False,
) -> Any:
    """Sample pictures of prompts; equal settings reuse earlier pictures.

    Args:
        model: Name of a published model (`digits`, `digits@v2`), folder, hub id or URL.
        prompts: Prompts; alternatively `settings` has a `file` of prompts.
        settings: Other settings of configs/settings/generate.py, such as {"seed": 7}.
        out: Output folder; the pictures are in a folder of it, named by the key.
        skip_grid: Leave out the grid.
        skip_save: Leave out the single pictures.

    Returns a report: `folder`, `pictures`, `seconds`, `first_seconds`, `compile_seconds`.
    """
    prepare_process()
    with redacted_errors():
        drawing = stage.with_prompts(read_settings(model, prompts, revealed(settings or {})))
        folder = output_folder(out)
    return copy(drawing, draw(drawing, runtime.flow_run.id), folder, not skip_grid, not skip_save)


def output_folder(out: str) -> Path:
    """The output folder, which may be missing. Raises Refused unless it can be written."""
    if "://" in out:
        raise Refused(f"out: {out} is a URL: choose a local folder; only `store` may be a URL")
    folder = Path(out)
    try:  # the first that exists: a failed run leaves no empty folder
        existing = next(p for p in (folder, *folder.parents) if os.path.lexists(p))
        with NamedTemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise Refused(f"out: {out} is not writable: {error}") from None
    return folder


def print_report(report: dict[str, Any], *, as_json: bool) -> None:
    """Print the output folder and the timings."""
    if as_json:
        print(json.dumps(report), flush=True)
        return
    if report["outcome"] == "reused":
        print(f"{report['pictures']} pictures, reused: {report['folder']}")
        return
    print(
        f"{report['pictures']} pictures: {report['folder']} "
        f"({report['seconds']:.1f} s, {report['first_seconds']:.1f} s of it for the first batch; "
        f"{report['compile_seconds']:.1f} s of compiling before)"
    )
