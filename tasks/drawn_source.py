"""Pictures that the base draws as a source: once for all runs, then read as any folder.

They keep what the base knows of a class (DreamBooth's prior preservation, arXiv 2208.12242).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from typing import Any

from PIL import Image

from artifacts.store import Artifact, Draft
from configs.settings.data import DrawnSource, FolderSource
from configs.settings.evaluate import Evaluate
from configs.settings.recipe import Recipe
from runtimes import registry
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import GenerateJob
from tasks.build_or_reuse import Stage
from tasks.child_process import run_job
from tasks.code_version import runtime_facts
from tasks.evaluate import draw
from tasks.evaluate.inputs import model_digests
from tasks.evaluate.metrics import read_prompts
from tasks.panels import Facts, Panel, PicturePanel, Table, picture_grid, to_png
from tasks.progress import Progress
from tasks.train import check_guidance

#: Pictures of one job, which a larger `count` has in the same places.
PART = 100
FOLDER = "pictures"
TABLE = "metadata.jsonl"  # as folders are read (tasks/download/folders.py)
SHOWN = 20  # pictures in the report


def sampling_of(recipe: Recipe, source: DrawnSource) -> Evaluate:
    """The settings of the evaluation, with the source's own sampler and seed."""
    names = {"scheduler", "num_inference_steps", "guidance_scale", "seed"}
    own = {n: v for n, v in source.model_dump(include=names).items() if v is not None}
    return recipe.evaluate.model_copy(update=own)


def check(recipe: Recipe, base: Base) -> None:
    """Raise Refused for a drawn source whose sampler the base or the runtime does not support."""
    if isinstance(recipe.source, DrawnSource):
        sampling = sampling_of(recipe, recipe.source)
        steps = sampling.num_inference_steps
        about = (recipe.runtime, base.scheduler, sampling.scheduler, steps)
        registry.check_scheduler(*about, section="source.")
        check_guidance(sampling, base)


@dataclass(frozen=True)
class DrawnStage(Stage):
    """The pictures of a drawn source, with a table of their prompts."""

    recipe: Recipe
    source: DrawnSource
    base: Base
    run: draw.RunJob = run_job

    name = "drawn"
    version = 1

    @property
    def settings(self) -> dict[str, Any]:
        """Prompts, number and sampler."""
        sampling = sampling_of(self.recipe, self.source)
        sampler = draw.sampler_settings(sampling, "dtype")
        return {"prompts": list(self.prompts), "count": self.source.count, "sampler": sampler}

    @property
    def inputs(self) -> dict[str, str]:
        """The base."""
        return model_digests(self.base)

    @cached_property
    def prompts(self) -> tuple[str, ...]:
        """The distinct prompts, which pictures have in turn."""
        file = self.source.file
        return self.source.prompts if file is None else read_prompts("source.file", file)

    def build(self, draft: Draft, progress: Progress) -> dict[str, Any]:
        """Draw the pictures that no earlier run has drawn, and write all with their prompts."""
        model = draw.EvalModel(draw.digest_eval_model(self.base, None), self.base)
        lines = list[str]()
        for spec in self._specs():
            (shard,) = draw.draw([model], spec, draft, self.run, progress)
            files = draw.read_files(draft.store, shard)
            for prompt, png in zip(spec.job.prompts, files, strict=True):
                name = f"{len(lines):05d}.png"
                draft.write(f"{FOLDER}/{name}", png)
                lines.append(json.dumps({"file_name": name, "text": prompt}, ensure_ascii=False))
        draft.write(f"{FOLDER}/{TABLE}", "".join(f"{line}\n" for line in lines).encode())
        return {"pictures": len(lines), "run": runtime_facts(self.recipe.runtime)}

    @staticmethod
    def folder(drawn: Artifact) -> FolderSource:
        """The pictures as a source."""
        return FolderSource(kind="folder", path=drawn.url(FOLDER))

    def _specs(self) -> Iterator[draw.SamplingSpec]:
        """The job of each part; a picture's number selects its prompt and noise."""
        sampling = sampling_of(self.recipe, self.source)
        for first in range(0, self.source.count, PART):
            numbers = range(first, min(first + PART, self.source.count))
            job = GenerateJob(
                runtime=self.recipe.runtime,
                **self.base.job_fields,
                drawings=(),
                prompts=tuple(self.prompts[number % len(self.prompts)] for number in numbers),
                sampler=draw.sampler_settings(sampling, "batch_size"),
                device=sampling.device,
                dtype=sampling.dtype,
                flash_attention=self.recipe.train.mindspore.flash_attention,
                offload=sampling.offload,
                first=first,
            )
            yield draw.SamplingSpec(job, "", {})

    @staticmethod
    def show(artifact: Artifact) -> list[Panel]:
        """The first pictures, and their prompts."""
        lines = artifact.read(f"{FOLDER}/{TABLE}").decode().splitlines()[:SHOWN]
        rows = [json.loads(line) for line in lines]
        files = (artifact.read(f"{FOLDER}/{row['file_name']}") for row in rows)
        pictures = (Image.open(BytesIO(file)) for file in files)
        grid = picture_grid(pictures, len(rows), 5, gap=2)
        facts = {"pictures": artifact.summary["pictures"]}
        return [
            PicturePanel("Drawn by the base", to_png(grid)),
            Facts("Drawn", facts),
            Table("Prompts", rows),
        ]
