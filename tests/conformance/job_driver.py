"""Jobs one after another in one process, so that a program is compiled once."""

import json
import logging
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from altered_rows import of_rows

from configs.settings.train import Train
from runtimes.__main__ import main
from runtimes.data.loader import open_job_latents
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import EVENT_FD, TrainJob, read_job
from runtimes.registry import open_runtime, prepare
from runtimes.train.training_loop import make_batches


def do(path: str) -> dict[str, Any]:
    """Do a job as `python -m runtimes JOB.json` does; its exit code and its events.

    Leaves nothing behind that the next job would find.
    """
    log = logging.getLogger("kiln")
    before = list(log.handlers)
    with tempfile.TemporaryFile("w+") as events:
        os.environ[EVENT_FD] = str(os.dup(events.fileno()))  # `main` closes it
        try:
            code = main([path])
        except SystemExit as ended:
            code = int(ended.code or 0)
        log.handlers[:] = before
        events.seek(0)
        return {"code": code, "events": [json.loads(line) for line in events]}


def rows(path: str, which: list[str]) -> list[float]:
    """Losses and gradient norms of steps on a job's batches, altered as `of_rows` does."""
    job = read_job(Path(path))
    assert isinstance(job, TrainJob)
    base, settings = Base.of(job), Train(**job.train)
    source = replace(job, mixture={})  # the latents are of one
    loader, _ = make_batches(source, base, settings, open_job_latents(job.latents))
    prepare(job)
    runtime = open_runtime(job.runtime)
    runtime.load(job, base)
    batch = of_rows(loader.batch, which)
    figures: list[float] = []
    for step in range(settings.steps):
        output = runtime.step(runtime.put(batch(step)), settings.learning_rate)
        figures += [float(output.loss), float(output.grad_norm)]
    runtime.shutdown()
    return figures
