"""The generate job of every runtime: images and held-out losses of a list of models."""

from __future__ import annotations

import io
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from artifacts.filesystems import entries, name_of
from artifacts.latent_shards import LatentScale
from artifacts.records import write_atomic
from configs.settings.train_parts import MaskedLoss
from runtimes.contract import Pipeline
from runtimes.data.loader import BatchReader, Holdout, draw_losses, open_job_latents
from runtimes.objective.noise_schedule import read_schedule
from runtimes.objective.training_objective import Objective
from runtimes.pipeline_folder.folder import Base, folder_extras
from runtimes.process.job import Drawing, Events, GenerateJob
from runtimes.registry import open_pipeline
from runtimes.sample.reference_pictures import drawn_batches

LOSS_BATCH = 32
LOSSES = "losses.json"
#: PNG text key of the sampling parameters; AUTOMATIC1111's web UI uses the same key.
PNG_KEY = "parameters"


def generate(job: GenerateJob, events: Events, host: int = 0) -> dict[str, Any]:
    """Write `<out>/00000.png`, ... and `<out>/losses.json` for each drawing of the job.

    Existing files are kept, so an interrupted job continues with the first missing batch. Several
    hosts have whole batches in turn: a batch on one of them has the bytes that it has on any.

    Args:
        host: number of this host among the `hosts` of the job.

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
    outs = [_Out.of(drawing.out) for drawing in job.drawings]
    share = drawn_batches(job)[host :: job.hosts]
    missing = [[batch for batch in share if out.lacks(batch)] for out in outs]
    total = len(outs) * sum(map(len, share))
    done = total - sum(len(numbers) for batches in missing for numbers in batches)
    events.emit("drawn", done=done, total=total)
    already = done
    seconds = list[float]()
    compiling = 0.0
    for model, (drawing, out, batches) in enumerate(zip(job.drawings, outs, missing, strict=True)):
        is_ours = model % job.hosts == host
        wanted = is_ours and job.latents is not None and LOSSES not in out.names
        if not batches and not wanted:
            continue
        pipeline.load(drawing)
        for numbers in batches:
            prompts = [job.prompts[number] for number in numbers]
            since = time.perf_counter()
            before = pipeline.compile_seconds()
            first = job.first + (0 if job.fixed_noise else numbers.start)
            references = job.references[numbers.start : numbers.stop]
            controls = job.controls[numbers.start : numbers.stop]
            pictures = pipeline.draw(prompts, first, references, controls)
            compiled = pipeline.compile_seconds() - before
            seconds.append(time.perf_counter() - since - compiled)
            compiling += compiled
            _save_images(pictures, numbers, out, job, first)
            done += len(numbers)
            events.emit("drawn", done=done, total=total)
        if wanted:
            events.emit("losses", model=model + 1, models=len(job.drawings))
            with _holdout(job, base, drawing, pipeline) as holdout:
                found: dict[str, Any] = {"losses": draw_losses(holdout, pipeline.errors)}
                found |= {"sources": holdout.sources} if any(holdout.sources) else {}
            out.write(LOSSES, json.dumps(found).encode())
    return {
        "drawn": done - already,
        "seconds": sum(seconds),
        "first_seconds": seconds[0] if seconds else 0.0,
        "compile_seconds": compiling,
    }


@dataclass(frozen=True)
class _Out:
    """The folder of a drawing, and the names of its files."""

    fs: AbstractFileSystem
    root: str
    names: set[str]

    @classmethod
    def of(cls, place: str) -> _Out:
        fs, root = url_to_fs(place, use_listings_cache=False)
        fs.makedirs(root, exist_ok=True)
        return cls(fs, root, {name_of(entry) for entry in entries(fs, root)})

    def lacks(self, numbers: range) -> bool:
        """Whether a picture of a batch is missing.

        A batch is sampled again as a whole: the last bits of a picture depend on the other rows.
        """
        return not {_name(number) for number in numbers} <= self.names

    def write(self, name: str, data: bytes) -> None:
        write_atomic(self.fs, f"{self.root}/{name}", data)
        self.names.add(name)


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
    masked = job.holdout.get("masked_loss")
    reader = BatchReader(
        latents,
        family,
        objective,
        text_encoders=pipeline.encodes_text,
        extras=replace(
            folder_extras(Path(drawing.parts.get(family.denoiser, base.denoiser_folder))),
            control="controlnet" in drawing.parts,
        ),
        guidance_scale=job.holdout.get("guidance_scale", 1.0),
        masked_loss=None if masked is None else MaskedLoss(**masked),
    )
    return Holdout(
        reader,
        samples=job.holdout["samples"],
        draws=job.holdout["levels"],
        batch_size=min(LOSS_BATCH, job.sampler["batch_size"]),  # the sampling batch fits in memory
    )


def _save_images(
    pictures: NDArray[np.uint8], numbers: range, out: _Out, job: GenerateJob, first: int
) -> None:
    for row, (number, picture) in enumerate(zip(numbers, pictures, strict=True)):
        name = _name(number)
        if name not in out.names:
            png = io.BytesIO()
            text = PngInfo()
            if job.words is not None:
                parameters = {"prompt": job.prompts[number], "noise": first + row, **job.words}
                text.add_itxt(PNG_KEY, json.dumps(parameters, ensure_ascii=False))
            Image.fromarray(picture).save(png, "png", pnginfo=text)
            out.write(name, png.getvalue())


def _name(number: int) -> str:
    return f"{number:05d}.png"
