"""A held-out loss is of samples: each is the mean of its draws, whatever batches they lie in."""

import numpy as np
import pytest
from numpy.typing import NDArray

from artifacts.latent_shards import open_latents
from runtimes.contract import StepBatch
from runtimes.data.holdout_batches import Holdout, sample_losses
from runtimes.data.loader import BatchReader
from runtimes.families import FAMILIES
from runtimes.objective.latents_from_moments import LatentScale
from runtimes.objective.noise_schedule import NoiseSchedule
from runtimes.objective.noised_batch import Objective
from runtimes.train.validation import HeldOutLoss

SCHEDULE = NoiseSchedule.from_config({"beta_schedule": "scaled_linear"})
OBJECTIVE = Objective(SCHEDULE, LatentScale(0.5), seed=1)


def test_a_sample_s_loss_is_the_mean_of_its_draws(latents_url: str) -> None:
    latents = open_latents(latents_url)

    def losses(batch_size: int, draws: int) -> list[float]:
        given = {"samples": 4, "draws": draws, "batch_size": batch_size}
        with Holdout(BatchReader(latents, FAMILIES["sdxl"], OBJECTIVE), **given) as holdout:
            found = sample_losses(holdout, squares)
        assert found is not None
        return found

    assert losses(3, 4) == pytest.approx(losses(100, 4))
    drawn: list[float] = []
    reader = BatchReader(latents, FAMILIES["sdxl"], OBJECTIVE)
    with Holdout(reader, samples=4, draws=4, batch_size=1) as holdout:
        numbers = [(n[0], squares(batch)[0]) for n, batch in holdout.batches()]
    for sample in range(4):
        drawn.append(np.mean([error for number, error in numbers if number == sample]))
    assert losses(3, 4) == pytest.approx(drawn)
    assert len({error for _, error in numbers}) == 16


def squares(batch: StepBatch) -> NDArray[np.float32]:
    """An error that hangs on the noise of each draw."""
    return np.square(batch.noisy_latents).mean(axis=(1, 2, 3))


def test_the_error_of_the_mean_is_over_samples() -> None:
    assert HeldOutLoss.of([1.0, 2.0, 3.0]) == HeldOutLoss(2.0, pytest.approx(1 / 3**0.5))
    assert HeldOutLoss.of([1.0]) == HeldOutLoss(1.0, None)
