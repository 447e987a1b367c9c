"""A held-out loss is of samples: each is the mean of its draws, whatever batches they lie in."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from jobs import MakeJob
from numpy.typing import NDArray

from artifacts.latent_shards import LatentScale, open_latents
from configs.errors import Refused
from runtimes.contract import StepBatch
from runtimes.data.loader import BatchReader, Holdout, draw_losses
from runtimes.families import FAMILIES
from runtimes.objective.noise_schedule import NoiseSchedule
from runtimes.objective.training_objective import Objective
from runtimes.pipeline_folder.folder import Base
from runtimes.train.training_loop import make_batches, read_train_settings
from runtimes.train.validation import HeldOutLoss

WriteLatents = Callable[..., str]  # of conftest.py
SCHEDULE = NoiseSchedule.from_config({"beta_schedule": "scaled_linear"})
OBJECTIVE = Objective(SCHEDULE, LatentScale(0.5), seed=1)


def test_a_sample_s_loss_is_the_mean_of_its_draws(latents_url: str) -> None:
    latents = open_latents(latents_url)

    def losses(batch_size: int) -> list[list[float]]:
        given = {"samples": 4, "draws": 4, "batch_size": batch_size}
        with Holdout(BatchReader(latents, FAMILIES["sdxl"], OBJECTIVE), **given) as holdout:
            found = draw_losses(holdout, squares)
        assert found is not None
        return found

    np.testing.assert_allclose(losses(3), losses(100), rtol=1e-6)
    reader = BatchReader(latents, FAMILIES["sdxl"], OBJECTIVE)
    with Holdout(reader, samples=4, draws=4, batch_size=1) as holdout:
        numbers = [(n[0], squares(batch)[0]) for n, batch in holdout.batches()]
    drawn = [[error for number, error in numbers if number == sample] for sample in range(4)]
    np.testing.assert_allclose(losses(3), drawn, rtol=1e-6)
    means = np.mean(drawn, axis=1)
    assert HeldOutLoss.of(losses(3)).loss == pytest.approx(means.mean())
    assert HeldOutLoss.of(losses(3)).error == pytest.approx(means.std(ddof=1) / 2)
    assert len({error for _, error in numbers}) == 16


def squares(batch: StepBatch) -> NDArray[np.float32]:
    """An error that hangs on the noise of each draw."""
    return np.square(batch.noisy_latents).mean(axis=(1, 2, 3))


def test_the_error_of_the_mean_is_over_samples() -> None:
    assert HeldOutLoss.of([[1.0], [2.0], [3.0]]) == HeldOutLoss(2.0, pytest.approx(1 / 3**0.5))
    assert HeldOutLoss.of([[1.0]]) == HeldOutLoss(1.0, None)


def test_held_out_samples_may_be_in_other_latents_than_those_to_train_on(
    make_job: MakeJob, latents_url: str, write_latents: WriteLatents, tmp_path: Path
) -> None:
    """Few selected shards of a retraining may have none."""
    few = write_latents(tmp_path / "store", [{"train/8x8": 2}])
    settings = {"holdout_loss": {"every_n_steps": 1}, "global_batch_size": 2}
    job = make_job(latents=few, **settings)
    with pytest.raises(Refused, match="the latents have no held-out samples"):
        make_batches(job, Base.of(job), read_train_settings(job), open_latents(few))
    job = replace(job, holdout=latents_url)
    given = (job, Base.of(job), read_train_settings(job), open_latents(few))
    with make_batches(*given)[1] or pytest.fail("none") as holdout:
        assert sorted({n for numbers, _ in holdout.batches() for n in numbers}) == [*range(5)]


def test_the_manifest_of_the_latents_is_not_read_again(
    make_job: MakeJob, latents_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of 400,000 shards has 507 MiB in memory."""
    job = make_job(latents=latents_url, holdout_loss={"every_n_steps": 1})
    monkeypatch.setattr("runtimes.data.loader.open_job_latents", pytest.fail)
    latents = open_latents(latents_url)
    _, holdout = make_batches(job, Base.of(job), read_train_settings(job), latents)
    assert holdout is not None


def test_masks_weight_the_held_out_loss_as_that_of_training(
    make_job: MakeJob, latents_url: str
) -> None:
    for masked_loss in None, {"unmasked_weight": 0.5}:
        job = make_job(holdout_loss={"every_n_steps": 1}, masked_loss=masked_loss)
        latents = open_latents(latents_url)
        loader, holdout = make_batches(job, Base.of(job), read_train_settings(job), latents)
        assert holdout is not None
        with holdout:
            batches = [loader.batch(0), *(batch for _, batch in holdout.batches())]
        assert {batch.loss_mask is None for batch in batches} == {masked_loss is None}
