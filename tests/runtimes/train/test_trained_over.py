"""A model trained over to other noise is drawn, measured and published with what it knows."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, PNDMScheduler, StableDiffusionXLPipeline
from jobs import loader_of
from PIL import Image
from tolerances import assert_close

from runtimes.objective.noise_schedule import NoiseSchedule, read_schedule
from runtimes.objective.random_draws import Stream, generator
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import Drawing, GenerateJob, SilentEvents, TrainJob
from runtimes.sample.generate_job import generate
from runtimes.torch.runtime import TheRuntime
from runtimes.train.training_loop import write_result
from tasks.publish.assemble import assemble

pytestmark = pytest.mark.slow

MakeJob = Callable[..., TrainJob]
SAMPLER: dict[str, Any] = {
    "seed": 7,
    "num_inference_steps": 3,
    "guidance_scale": 1.0,
    "height": None,
    "width": None,
    "batch_size": 1,
}
OVER = {"prediction_type": "v_prediction", "zero_terminal_snr": True}
FILE = "scheduler/scheduler_config.json"


def trained(job: TrainJob) -> tuple[TheRuntime, list[str]]:
    """Two steps of the job, and the files that they leave."""
    runtime = TheRuntime()
    runtime.load(job, Base.of(job))
    loader = loader_of(job)
    for step in range(2):
        runtime.step(loader.batch(step), 1e-2)
    return runtime, [file.path for file in write_result(job, Base.of(job), runtime.state(), [])]


def pictures(job: TrainJob, *drawings: Drawing) -> None:
    """Each drawing's picture and held-out losses."""
    job_to_draw = GenerateJob(
        runtime="torch",
        model=job.model,
        drawings=drawings,
        prompts=("one",),
        sampler=SAMPLER,
        device="cpu",
        latents=job.latents,
        holdout={"samples": 4, "levels": 2, "seed": 1, "noise_offset": 0.0},
    )
    generate(job_to_draw, SilentEvents())


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path)).astype(int)


def parts(job: TrainJob, *names: str) -> dict[str, str]:
    return {name: f"{job.out}/{name}" for name in names}


def test_the_scheduler_is_left_beside_the_weights_only_if_it_changed(make_job: MakeJob) -> None:
    _, files = trained(make_job("same", prediction_type="epsilon"))
    assert FILE not in files
    over = make_job("over", **OVER)
    _, files = trained(over)
    config = json.loads(Path(over.out, FILE).read_text())
    assert FILE in files and config["rescale_betas_zero_snr"] and "unet/config.json" in files
    assert (config["prediction_type"], config["timestep_spacing"]) == ("v_prediction", "trailing")


def test_it_is_drawn_and_measured_with_its_own_scheduler(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(**OVER)
    runtime, _ = trained(job)
    both, base_noise, alone = (tmp_path / name for name in ("both", "base-noise", "alone"))
    pictures(
        job,
        Drawing(str(both), parts(job, "unet", "scheduler")),
        Drawing(str(base_noise), parts(job, "unet")),
        Drawing(str(tmp_path / "base")),
    )
    pictures(job, Drawing(str(alone)))  # what is drawn before another does not matter
    for name in ("00000.png", "losses.json"):
        assert (both / name).read_bytes() != (base_noise / name).read_bytes()
        assert (alone / name).read_bytes() == (tmp_path / "base" / name).read_bytes()
    while_training = runtime.sample(["one"], SAMPLER)[0].astype(int)
    assert np.abs(while_training - pixels(both / "00000.png")).max() <= 1


def test_what_is_published_draws_as_it_was_evaluated(make_job: MakeJob, tmp_path: Path) -> None:
    """Of a base whose scheduler knows nothing of zero terminal SNR: another stands in."""
    base = tmp_path / "base"
    pipe = StableDiffusionXLPipeline.from_pretrained(make_job().model, add_watermarker=False)
    pipe.scheduler = PNDMScheduler.from_config(pipe.scheduler.config, skip_prk_steps=True)
    pipe.save_pretrained(base)
    job = replace(make_job(**OVER), model=str(base))
    trained(job)
    drawn = tmp_path / "drawn"
    pictures(job, Drawing(str(drawn), parts(job, "unet", "scheduler")))
    out = tmp_path / "published"
    instead = {name: Path(job.out, name) for name in ("unet", "scheduler")}
    assemble(Base.open(base), instead, out, dtype="float32")
    published = StableDiffusionXLPipeline.from_pretrained(out, add_watermarker=False)
    assert isinstance(published.scheduler, DDIMScheduler)
    noise = generator(7, Stream.PICTURE, 0).standard_normal((1, 4, 8, 8), dtype=np.float32)
    picture = published(
        "one", num_inference_steps=3, guidance_scale=1.0, latents=torch.from_numpy(noise)
    ).images[0]
    assert np.abs(np.asarray(picture).astype(int) - pixels(drawn / "00000.png")).max() <= 1
    schedule = read_schedule(out / "scheduler")
    assert isinstance(schedule, NoiseSchedule)
    assert_close(schedule.alphas_cumprod, published.scheduler.alphas_cumprod)


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
def test_every_prediction_type_is_learnt(make_job: MakeJob, kind: str) -> None:
    job = make_job(prediction_type=kind, snr_gamma=5.0, steps=15)
    runtime = TheRuntime()
    runtime.load(job, Base.of(job))
    batch = loader_of(job).batch(0)
    losses = [float(runtime.step(batch, 3e-3).loss) for _ in range(15)]
    assert losses[-1] < 0.9 * losses[0]
