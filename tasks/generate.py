"""The generate stage: pictures of prompts by one model, and a list of what each is."""

from __future__ import annotations

import json
import re
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from artifacts.models import resolve_model
from artifacts.store import Artifact, Draft, KeyParts
from configs.generating import Generate
from configs.schema import NAME
from runtimes.contract import WrongInput
from runtimes.families import detect_family
from runtimes.objective.noise_scheduler import drawing_config, read_config
from runtimes.process.job import Drawing, GenerateJob
from runtimes.registry import (
    check_devices,
    check_family,
    check_installed,
    check_scheduler,
    uses_tabulated_scheduler,
)
from runtimes.sample.start import check_size
from tasks.evaluate.pictures import Painter, Run, scratch, told
from tasks.evaluate.prompts import read_prompts
from tasks.evaluate.published import published_painter
from tasks.panels import Facts, Panel, Picture, Table
from tasks.process import run_job
from tasks.progress import Progress
from tasks.publish.registry import Registry

STAGE = "generate"
VERSION = 1
LIST = "pictures.json"
GAP = 2  # pixels between pictures of the grid
#: Settings that say where something is or is done, or how pictures are laid out.
PLACES = {"model", "file", "store", "registry", "device", "grid_columns"}
SCORES = ("aesthetic_score", "negative_aesthetic_score")
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
    if settings.device not in ("auto", "cpu"):
        check_devices(settings.runtime, {"device": settings.device})
    check_family(settings.runtime, detect_family(painter.folder).name)
    own = read_config(painter.part("scheduler"))
    check_scheduler(settings.runtime, own, settings.scheduler, "scheduler")
    chosen = settings.scheduler
    kind = (own if chosen is None else drawing_config(own, chosen))["_class_name"]
    if settings.ddim_eta and not kind.startswith("DDIM"):
        raise WrongInput(f"ddim_eta is for scheduler ddim, this one is {kind}: set it to 0")
    if not painter.extras.aesthetic_score:
        try:
            settings.refuse_changed(SCORES, "a model that was not trained with scores")
        except ValueError as error:
            raise WrongInput(str(error)) from None
    if settings.negative_prompt is not None and settings.guidance_scale <= 1:
        raise WrongInput(
            "negative_prompt: nothing leads away from it: raise guidance_scale above 1"
        )
    if settings.ddim_eta and uses_tabulated_scheduler(settings.runtime):
        raise WrongInput(f"ddim_eta: runtime {settings.runtime} draws no noise in steps: set 0")
    asked = {"height": settings.height, "width": settings.width}
    check_size(asked, painter.folder, painter.vae)


def settings_for_key(settings: Generate) -> dict[str, Any]:
    """All that changes a picture, but the model's content."""
    return settings.model_dump(mode="json", exclude=PLACES)


def key_parts(settings: Generate, painter: Painter) -> KeyParts:
    """What the pictures depend on: settings and model."""
    return KeyParts(STAGE, VERSION, settings_for_key(settings), {"model": painter.digest})


def with_prompts(settings: Generate) -> Generate:
    """The settings with the prompts of their file, which is not read again. Raises WrongInput."""
    if settings.file is None:
        return settings
    prompts = read_prompts("file", settings.file)
    return settings.model_copy(update={"prompts": prompts, "file": None})


def build(
    settings: Generate,
    painter: Painter,
    draft: Draft,
    progress: Progress,
    *,
    run: Run = run_job,
) -> dict[str, Any]:
    """Draw into the draft: `samples/00000.png`, ..., and the list."""
    prompts = ordered(settings)
    with scratch(draft) as folder:
        job = _job(settings, painter, prompts, folder, draft)
        result = run(job, told(STAGE, progress))
        for number in range(len(prompts)):
            draft.upload(str(folder / f"{number:05d}.png"), f"samples/{number:05d}.png")
    noise = settings.num_images_per_prompt if settings.fixed_noise else len(prompts)
    listed = [
        {"file": f"samples/{number:05d}.png", "prompt": prompt, "noise": number % noise}
        for number, prompt in enumerate(prompts)
    ]
    times = {name: result[name] for name in ("seconds", "first_seconds", "compile_seconds")}
    text = json.dumps({"pictures": listed, "settings": job.words}, indent=1, ensure_ascii=False)
    draft.write(LIST, text.encode())
    kept = {
        "pictures": len(prompts),
        "num_images_per_prompt": settings.num_images_per_prompt,
        "drawn": result["drawn"],
    }
    return {**kept, **times}


def ordered(settings: Generate) -> tuple[str, ...]:
    """The prompt of each picture: round after round, every prompt's samples side by side."""
    one = [prompt for prompt in settings.prompts for _ in range(settings.num_images_per_prompt)]
    return tuple(one * settings.num_rounds)


def grid(artifact: Artifact, columns: int, most: int | None = None) -> bytes:
    """A PNG of its pictures, or the first `most` of them, `columns` in a row."""
    names = sample_names(artifact)[:most]
    columns = min(columns, len(names))
    rows = -(-len(names) // columns)
    page: Image.Image | None = None
    for number, name in enumerate(names):
        picture = Image.open(BytesIO(artifact.read(name)))
        step = (picture.width + GAP, picture.height + GAP)
        if page is None:
            page = Image.new("RGB", (columns * step[0] - GAP, rows * step[1] - GAP), "white")
        row, column = divmod(number, columns)
        page.paste(picture, (column * step[0], row * step[1]))
    assert page is not None  # there is at least one
    buffer = BytesIO()
    page.save(buffer, "png")
    return buffer.getvalue()


def sample_names(artifact: Artifact) -> list[str]:
    """Where its pictures are, in order."""
    return [one["file"] for one in json.loads(artifact.read(LIST))["pictures"]]


def show(artifact: Artifact) -> list[Panel]:
    """The grid, how long it took, and which picture is of which prompt."""
    found = json.loads(artifact.read(LIST))
    title = f"Pictures ({len(found['pictures'])})"
    return [
        Picture("Grid", grid(artifact, artifact.summary["num_images_per_prompt"], SHOWN)),
        Facts("Drawn", artifact.summary),
        Facts("Settings", {k: v for k, v in found["settings"].items() if v is not None}),
        Table(title, found["pictures"][:SHOWN]),
    ]


def _job(
    settings: Generate, painter: Painter, prompts: tuple[str, ...], out: Path, draft: Draft
) -> GenerateJob:
    names = {"seed", "scheduler", "num_inference_steps", "guidance_scale", "height", "width"}
    names |= {"negative_prompt", *SCORES}
    given = settings.model_dump(mode="json")
    sampler = {name: given[name] for name in sorted(names)}
    sampler |= {"eta": settings.ddim_eta, "batch_size": settings.num_images_per_prompt}
    told_too = {"ddim_eta", "dtype", "runtime", "num_images_per_prompt", "fixed_noise"}
    words = {name: given[name] for name in sorted(names | told_too)}
    return GenerateJob(
        runtime=settings.runtime,
        model=str(painter.folder),
        drawings=(Drawing(str(out), painter.tuned.part_names(), painter.tuned.lora_name()),),
        prompts=prompts,
        sampler=sampler,
        device=settings.device,
        dtype=settings.dtype,
        vae=None if painter.vae is None else str(painter.vae),
        compiled=draft.store.compiled_url,
        fixed_noise=settings.fixed_noise,
        words={**words, "model": painter.digest},
    )
