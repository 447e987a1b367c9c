"""The generate stage: pictures of prompts by one model, a grid of them, a list of what each is."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from artifacts.models import resolve_model
from artifacts.store import Artifact, Draft
from configs.generating import Generate
from configs.schema import NAME
from runtimes.base import WrongInput
from runtimes.encoders import describe_encoders
from runtimes.families import detect_family
from runtimes.job import Drawing, GenerateJob
from runtimes.objective.scheduler import drawing_config, read_config
from runtimes.registry import check_family, check_installed, check_scheduler, draws_by_tables
from tasks.evaluate.pictures import Painter, scratch, told
from tasks.evaluate.prompts import read_prompts
from tasks.evaluate.published import published_painter
from tasks.panels import Facts, Panel, Picture, Table
from tasks.process import run_job
from tasks.progress import Progress
from tasks.publish.registry import Registry

STAGE = "generate"
VERSION = 1
GRID, LIST = "grid.png", "pictures.json"
GAP = 2  # pixels between pictures of the grid
#: Settings that say where something is, or is kept.
PLACES = {"model", "file", "store", "registry", "n_rows"}
SHOWN = 20


def find_painter(settings: Generate) -> Painter:
    """The model that draws, on this machine.

    Raises:
        ModelNotFound, RegistryError: it is not there.
        WrongInput: it is none.
    """
    name, _, version = settings.model.partition("@")
    found = None
    if re.fullmatch(NAME, name):
        registry = Registry(settings.registry or f"{settings.store}/registry", name)
        found = registry.version(version) if version else registry.champion()
    return published_painter(resolve_model(settings.model if found is None else found.uri))


def check(settings: Generate, painter: Painter) -> None:
    """Raise WrongInput for settings that do not go with the model or the runtime."""
    check_installed(settings.runtime)
    check_family(settings.runtime, detect_family(painter.folder).name)
    own = read_config(painter.tuned.parts.get("scheduler", painter.folder / "scheduler"))
    check_scheduler(settings.runtime, own, settings.scheduler)
    chosen = settings.scheduler
    kind = (own if chosen is None else drawing_config(own, chosen))["_class_name"]
    if settings.ddim_eta and not kind.startswith("DDIM"):
        raise WrongInput(f"ddim_eta is for scheduler ddim, this one is {kind}: set it to 0")
    if settings.ddim_eta and draws_by_tables(settings.runtime):
        raise WrongInput(f"ddim_eta: runtime {settings.runtime} draws no noise in steps: set 0")
    step = math.lcm(8, describe_encoders(painter.folder, painter.vae)["size_step"])
    for name in ("height", "width"):
        if (getattr(settings, name) or 0) % step:
            raise WrongInput(f"{name}: {getattr(settings, name)} is not a multiple of {step}")


def settings_for_key(settings: Generate) -> dict[str, Any]:
    """All that changes a picture, but the model's content."""
    kept = settings.model_dump(mode="json", exclude=PLACES)
    return {**kept, "prompts": list(prompts_of(settings))}


def prompts_of(settings: Generate) -> tuple[str, ...]:
    """The prompts, from their file if they are in one. Raises WrongInput."""
    return settings.prompts or read_prompts("file", str(settings.file))


def build(settings: Generate, painter: Painter, draft: Draft, progress: Progress) -> dict[str, Any]:
    """Draw into the draft: `samples/00000.png`, ..., the grid, and the list."""
    prompts = ordered(prompts_of(settings), settings)
    with scratch(draft) as folder:
        job = _job(settings, painter, prompts, folder, draft)
        result = run_job(job, told(STAGE, progress))
        files = sorted(folder.glob("*.png"))
        for path in files:
            draft.upload(str(path), f"samples/{path.name}")
        draft.write(GRID, tiled(files, settings.n_rows or settings.n_samples))
    noise = settings.n_samples if settings.fixed_noise else len(prompts)
    listed = [
        {"file": f"samples/{path.name}", "prompt": prompt, "noise": number % noise}
        for number, (path, prompt) in enumerate(zip(files, prompts, strict=True))
    ]
    said = {"model": settings.model, "digest": painter.digest, **(job.words or {})}
    times = {name: result[name] for name in ("seconds", "first_seconds", "compile_seconds")}
    text = json.dumps({"pictures": listed, "settings": said}, indent=1, ensure_ascii=False)
    draft.write(LIST, text.encode())
    return {"pictures": len(files), "drawn": result["drawn"], **times}


def ordered(prompts: Sequence[str], settings: Generate) -> tuple[str, ...]:
    """The prompt of each picture: round after round, every prompt's samples side by side."""
    one = [prompt for prompt in prompts for _ in range(settings.n_samples)]
    return tuple(one * settings.n_iter)


def tiled(files: Sequence[Path], columns: int) -> bytes:
    """A PNG of all pictures, `columns` in a row."""
    pictures = [np.asarray(Image.open(path)) for path in files]
    height, width, _ = pictures[0].shape
    columns = min(columns, len(pictures))
    rows = -(-len(pictures) // columns)
    size = (rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, 3)
    page = np.full(size, 255, np.uint8)
    for number, picture in enumerate(pictures):
        row, column = divmod(number, columns)
        top, left = row * (height + GAP), column * (width + GAP)
        page[top : top + height, left : left + width] = picture
    buffer = BytesIO()
    Image.fromarray(page).save(buffer, "png")
    return buffer.getvalue()


def show(artifact: Artifact) -> list[Panel]:
    """The grid, how long it took, and which picture is of which prompt."""
    found = json.loads(artifact.read(LIST))
    title = f"Pictures ({len(found['pictures'])})"
    return [
        Picture("Grid", artifact.read(GRID)),
        Facts("Drawn", artifact.summary),
        Facts("Settings", {k: v for k, v in found["settings"].items() if v is not None}),
        Table(title, found["pictures"][:SHOWN]),
    ]


def _job(
    settings: Generate, painter: Painter, prompts: tuple[str, ...], out: Path, draft: Draft
) -> GenerateJob:
    names = {"seed", "scheduler", "num_inference_steps", "guidance_scale", "height", "width"}
    names |= {"negative_prompt", "aesthetic_score", "negative_aesthetic_score"}
    given = settings.model_dump(mode="json")
    sampler = {name: given[name] for name in sorted(names)}
    sampler |= {"eta": settings.ddim_eta, "batch_size": settings.n_samples}
    words = {name: given[name] for name in sorted(names | {"ddim_eta", "precision", "runtime"})}
    return GenerateJob(
        runtime=settings.runtime,
        model=str(painter.folder),
        drawings=(Drawing(str(out), painter.tuned.part_names(), painter.tuned.lora_name()),),
        prompts=prompts,
        sampler=sampler,
        device=settings.device,
        dtype=settings.precision,
        vae=None if painter.vae is None else str(painter.vae),
        compiled=draft.store.compiled_url,
        fixed_noise=settings.fixed_noise,
        words={**words, "model": settings.model},
    )
