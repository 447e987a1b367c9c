"""The generate job of every runtime: images and held-out losses of a list of models."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from fsspec.implementations.local import LocalFileSystem
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from artifacts.latent_shards import LatentScale
from artifacts.records import write_atomic
from runtimes.contract import Pipeline
from runtimes.data.loader import BatchReader, Holdout, draw_losses, open_job_latents
from runtimes.objective.noise_schedule import read_schedule
from runtimes.objective.training_objective import Objective
from runtimes.pipeline_folder.folder import Base, folder_extras
from runtimes.process.job import Drawing, Events, GenerateJob
from runtimes.registry import open_pipeline

LOSS_BATCH = 32
#: PNG text key of the sampling parameters; AUTOMATIC1111's web UI uses the same key.
PNG_KEY = "parameters"


def generate(job: GenerateJob, events: Events) -> dict[str, Any]:
    """Write `<out>/00000.png`, ... and `<out>/losses.json` for each drawing of the job.

    Existing files are kept, so an interrupted job continues with the first missing batch.

    Returns:
        drawn: number of images written.
        seconds: sampling time without compilation.
        first_seconds: sampling time of the first batch, which includes one-time initialization.
        compile_seconds: compilation time.

    Raises:
        Refused: a model or the job's latents are missing or cannot be loaded.
    """
    base = Base.of(job)
    pipeline = open_pipeline(job, base)
    missing = [_missing(Path(drawing.out), job) for drawing in job.drawings]
    total = len(job.drawings) * len(job.prompts)
    done = total - sum(len(numbers) for batches in missing for numbers in batches)
    events.emit("drawn", done=done, total=total)
    already = done
    seconds = list[float]()
    compiling = 0.0
    for model, (drawing, batches) in enumerate(zip(job.drawings, missing, strict=True), 1):
        out = Path(drawing.out)
        out.mkdir(parents=True, exist_ok=True)
        losses = out / "losses.json"
        wanted = job.latents is not None and not losses.exists()
        if not batches and not wanted:
            continue
        pipeline.load(drawing)
        for numbers in batches:
            prompts = [job.prompts[number] for number in numbers]
            since = time.perf_counter()
            before = pipeline.compile_seconds()
            first = job.first + (0 if job.fixed_noise else numbers.start)
            pictures = pipeline.draw(prompts, first=first)
            compiled = pipeline.compile_seconds() - before
            seconds.append(time.perf_counter() - since - compiled)
            compiling += compiled
            _save_images(pictures, numbers, out, job, first)
            done += len(numbers)
            events.emit("drawn", done=done, total=total)
        if wanted:
            events.emit("losses", model=model, models=len(job.drawings))
            with _holdout(job, base, drawing, pipeline) as holdout:
                by_sample = draw_losses(holdout, pipeline.errors)
            _write(losses, json.dumps({"losses": by_sample}).encode())
    return {
        "drawn": done - already,
        "seconds": sum(seconds),
        "first_seconds": seconds[0] if seconds else 0.0,
        "compile_seconds": compiling,
    }


def _missing(out: Path, job: GenerateJob) -> list[range]:
    """Image numbers of each batch with a missing image.

    A batch is sampled again as a whole: the last bits of an image depend on the other rows.
    """
    size = job.sampler["batch_size"]
    count = len(job.prompts)
    batches = [range(start, min(start + size, count)) for start in range(0, count, size)]
    return [b for b in batches if not all(_path(out, number).exists() for number in b)]


def _holdout(job: GenerateJob, base: Base, drawing: Drawing, pipeline: Pipeline) -> Holdout:
    latents = open_job_latents(str(job.latents))
    family = base.family
    objective = Objective(
        schedule=read_schedule(Path(drawing.parts.get("scheduler", base.part("scheduler")))),
        scale=LatentScale.from_info(latents.info, draws=family.draws_latents),
        seed=job.holdout["seed"],
        noise_offset=job.holdout.get("noise_offset", 0.0),
        equidistant_levels=job.holdout["levels"],
    )
    reader = BatchReader(
        latents,
        family,
        objective,
        text_encoders=pipeline.encodes_text,
        extras=folder_extras(Path(drawing.parts.get(family.denoiser, base.denoiser_folder))),
        guidance_scale=job.holdout.get("guidance_scale", 1.0),
    )
    return Holdout(
        reader,
        samples=job.holdout["samples"],
        draws=job.holdout["levels"],
        batch_size=min(LOSS_BATCH, job.sampler["batch_size"]),  # the sampling batch fits in memory
    )


def _save_images(
    pictures: NDArray[np.uint8], numbers: range, out: Path, job: GenerateJob, first: int
) -> None:
    for row, (number, picture) in enumerate(zip(numbers, pictures, strict=True)):
        path = _path(out, number)
        if not path.exists():
            png = io.BytesIO()
            text = PngInfo()
            if job.words is not None:
                parameters = {"prompt": job.prompts[number], "noise": first + row, **job.words}
                text.add_itxt(PNG_KEY, json.dumps(parameters, ensure_ascii=False))
            Image.fromarray(picture).save(png, "png", pnginfo=text)
            _write(path, png.getvalue())


def _path(out: Path, number: int) -> Path:
    return out / f"{number:05d}.png"


def _write(path: Path, data: bytes) -> None:
    write_atomic(LocalFileSystem(), str(path), data)
