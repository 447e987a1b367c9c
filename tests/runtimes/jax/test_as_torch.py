"""What a run of runtime jax leaves and reports is what torch leaves and reports."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import chips
import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from driver_process import DriverProcess
from jobs import SAMPLER, MakeJob, loader_of, lora
from numpy.typing import NDArray
from PIL import Image
from tolerances import LOSS
from training import train

from runtimes.contract import StepBatch
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import TrainJob, write_job
from runtimes.train.training_loop import write_result

jax = chips.importorskip("jax")
from runtimes.jax.runtime import TheRuntime  # noqa: E402
from runtimes.jax.sampler import Sampler  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("jax")]  # they share a process


@pytest.fixture
def make_job(make_job: MakeJob, write_latents: Callable[..., str], tmp_path: Path) -> MakeJob:
    """On pictures of one size: each is a program of its own."""
    url = write_latents(tmp_path / "store", [{"train/8x8": 9, "holdout/8x8": 3}, {"train/8x8": 6}])
    return partial(make_job, latents=url)


def history(job: TrainJob, figure: str = "loss") -> list[float]:
    lines = (Path(job.out) / "history.jsonl").read_text().splitlines()
    return [line[figure] for line in map(json.loads, lines) if figure in line]


#: `python -m runtimes`, told how the other processes ended.
WATCHED = """
import sys
from runtimes import __main__
from runtimes.process import launcher
end = launcher.Launcher._end
def told(self, seconds):
    end(self, seconds)
    print([other.process.returncode for other in self._children], flush=True)
launcher.Launcher._end = told
sys.exit(__main__.main(sys.argv[1:]))
"""


def run_watched(job: TrainJob, folder: Path) -> str:
    """Run a job of several processes; how the others ended."""
    write_job(job, folder / "job.json")
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(folder / "job.json")],
        capture_output=True,
        text=True,
        timeout=1800,
        env={**os.environ, **chips.ENVIRONMENT["jax"]},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


def both(make_job: MakeJob, *, jax: dict[str, Any], **settings: Any) -> list[TrainJob]:
    """The same run, for torch and, with more settings, for jax."""
    sampled = {"sample_prompts": ("a red cat", "a blue dog", "a hill"), "sampler": SAMPLER}
    jobs = [make_job("torch", **settings), make_job("jax", runtime="jax", **{**settings, **jax})]
    return [replace(job, **sampled) for job in jobs]


@pytest.mark.soak
def test_adapters_validation_and_pictures_of_two_processes(
    make_job: MakeJob, tmp_path: Path
) -> None:
    """Each array is shared by two devices; each process measures all that is held out. In the end
    none is killed for waiting on the other."""
    settings = {"ema_decay": 0.9, "holdout_loss": {"every_n_steps": 2, "samples": 5, "draws": 2}}
    settings |= {"steps": 4, "sample_every_n_steps": 4, **lora(target_modules="attention")}
    expected, found = both(make_job, jax={"processes": 2, "fsdp": 2}, **settings)
    train(expected)
    assert run_watched(found, tmp_path) == "[0]"
    assert history(found) == pytest.approx(history(expected), rel=LOSS)
    of_torch = history(expected, "validation_loss")
    assert len(of_torch) == 2
    assert history(found, "validation_loss") == pytest.approx(of_torch, rel=LOSS)
    drawn, wanted = (
        np.asarray(Image.open(Path(job.work) / "samples/step-00000004.png")).astype(int)
        for job in (found, expected)
    )
    assert np.abs(drawn - wanted).max() <= 1  # of 255 levels
    first, second, _ = np.split(wanted, 3, axis=1)
    assert np.abs(first - second).max() >= 20


@pytest.mark.extended
def test_a_fresh_denoiser_starts_and_trains_alike(driver: DriverProcess, make_job: MakeJob) -> None:
    expected, found = both(make_job, jax={}, init="random", steps=4)
    train(expected)
    driver.call("train", asdict(found))
    assert history(found) == pytest.approx(history(expected), rel=LOSS)


def test_the_vae_leaves_the_devices_after_sampling(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[int]()

    def held() -> int:
        gc.collect()  # arrays of other tests
        return sum(array.nbytes for array in jax.live_arrays())

    def draw(sampler: Sampler, *_: Any, **__: Any) -> NDArray[np.uint8]:
        vae = sum(array.nbytes for array in sampler._vae.values())
        found.append(held() - vae)
        return np.zeros((1, 8, 8, 3), np.uint8)

    monkeypatch.setattr(Sampler, "draw", draw)
    runtime = TheRuntime()
    job = make_job(runtime="jax")
    runtime.load(job, Base.of(job))
    for _ in range(2):
        runtime.sample(["a"], SAMPLER)
        assert held() == found[-1]


def predicted(denoiser: UNet2DConditionModel, batch: StepBatch) -> NDArray[np.float32]:
    given = {name: torch.from_numpy(array) for name, array in batch.conditioning.items()}
    added = {"text_embeds": given["pooled_prompt_embeds"], "time_ids": given["add_time_ids"]}
    with torch.no_grad():
        found = denoiser(
            torch.from_numpy(batch.noisy_latents),
            torch.from_numpy(batch.timesteps),
            given["prompt_embeds"],
            added_cond_kwargs=added,
        )
    return found.sample.numpy()


def test_diffusers_loads_the_weights_and_predicts_the_same(make_job: MakeJob) -> None:
    job = make_job(runtime="jax", steps=3, learning_rate=1e-2)
    runtime = TheRuntime()
    runtime.load(job, Base.of(job))
    batch = loader_of(job).batch
    for step in range(3):
        runtime.step(batch(step), 1e-2)
    write_result(job, Base.of(job), runtime.state(), [])
    trained = UNet2DConditionModel.from_pretrained(f"{job.out}/unet")
    base = UNet2DConditionModel.from_pretrained(f"{job.model}/unet")
    last = batch(3)
    ours = predict(runtime, last)
    np.testing.assert_allclose(ours, predicted(trained, last), rtol=LOSS, atol=LOSS)
    assert np.abs(ours - predicted(base, last)).max() > 100 * LOSS


def predict(runtime: TheRuntime, batch: StepBatch) -> NDArray[np.float32]:
    """What the runtime's own program predicts."""
    from runtimes.jax.torchax_bridge import as_function

    call = jax.jit(as_function(runtime._network, training=False))
    given = batch.noisy_latents, batch.timesteps, batch.conditioning
    return np.asarray(call(runtime._averaged(), np.uint32(0), *given))
