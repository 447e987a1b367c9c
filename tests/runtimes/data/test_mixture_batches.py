"""Batches of a mixture: each row has its source's loss weight, caption dropout and target."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

from artifacts.latent_shards import Latents, LatentScale, open_latents
from runtimes.contract import StepBatch
from runtimes.data.loader import BatchReader, Holdout, Loader, draw_losses
from runtimes.families import FAMILIES
from runtimes.objective.noise_schedule import NoiseSchedule
from runtimes.objective.training_objective import Objective
from runtimes.train.validation import measure

SHARDS = {"old": {"train/8x8": 9, "holdout/8x8": 3}, "style": {"train/8x8": 6, "holdout/8x8": 5}}
FACTS = {
    "weight": None,
    "repeats": None,
    "loss_weight": 1.0,
    "caption_dropout_rate": None,
    "regularisation": None,
}


def facts(**settings: Any) -> dict[str, Any]:
    return {**FACTS, **settings}


def objective(**settings: Any) -> Objective:
    schedule = NoiseSchedule.from_config({"beta_schedule": "scaled_linear"})
    return Objective(schedule, LatentScale(0.5), seed=5, **settings)


@pytest.fixture
def latents(tmp_path: Path, write_mixture: Callable[..., str]) -> Latents:
    """The latents of two sources."""
    return open_latents(write_mixture({name: [groups] for name, groups in SHARDS.items()}))


def make_loader(latents: Latents, mixture: Any, **settings: Any) -> Loader:
    reader = BatchReader(latents, FAMILIES["sdxl"], objective(**settings), mixture=mixture)
    return Loader(reader, batch_size=6, seed=5, window=2)


def rows_of(loader: Loader, source: str, steps: int = 5) -> list[tuple[StepBatch, NDArray[Any]]]:
    """Each batch, and which of its rows are of a source."""
    sources = list(SHARDS)
    return [
        (loader.batch(n), np.array([sources[i.shard] == source for i in loader.order.batch(n)]))
        for n in range(steps)
    ]


def test_loss_weight_and_prior_are_of_the_source_s_rows_alone(latents: Latents) -> None:
    plain = make_loader(latents, {"old": facts(), "style": facts()}, snr_gamma=5.0)
    mixture = {"old": facts(loss_weight=0.25, regularisation="prior"), "style": facts()}
    mixed = make_loader(latents, mixture, snr_gamma=5.0)
    for step, (batch, old) in enumerate(rows_of(mixed, "old")):
        assert 0 < old.sum() < 6
        assert batch.is_prior is not None
        np.testing.assert_array_equal(batch.is_prior, old)
        unweighted = plain.batch(step)
        assert unweighted.is_prior is None
        np.testing.assert_array_equal(batch.weight, unweighted.weight * np.where(old, 0.25, 1.0))
        np.testing.assert_array_equal(batch.target, unweighted.target)


def test_caption_dropout_is_the_source_s_own_or_the_run_s(latents: Latents) -> None:
    mixture = {"old": facts(caption_dropout_rate=1.0), "style": facts()}
    loader = make_loader(latents, mixture, caption_dropout_rate=0.0)
    for batch, old in rows_of(loader, "old"):
        dropped = [not row.any() for row in batch.conditioning["prompt_embeds"]]
        np.testing.assert_array_equal(dropped, old)
    everywhere = make_loader(latents, {"old": facts(), "style": facts()}, caption_dropout_rate=1.0)
    assert not everywhere.batch(0).conditioning["prompt_embeds"].any()


def squares(batch: StepBatch) -> NDArray[np.float32]:
    return np.square(batch.noisy_latents).mean(axis=(1, 2, 3))


def test_held_out_losses_are_also_of_each_source(latents: Latents) -> None:
    """Each source has its own number of samples, so that a small one has some."""
    runtime: Any = Mock(errors=squares, evaluating=nullcontext, any_rank=bool)
    reader = BatchReader(latents, FAMILIES["sdxl"], objective())
    with Holdout(reader, samples=4, draws=2, batch_size=5) as holdout:
        assert holdout.sources == ["old"] * 3 + ["style"] * 4
        losses = [sum(draws) / 2 for draws in draw_losses(holdout, squares) or []]
        measured = measure(runtime, holdout, lambda: False)
    assert measured is not None
    assert measured.loss == pytest.approx(np.mean(losses))
    assert measured.by_source == pytest.approx(
        {"old": np.mean(losses[:3]), "style": np.mean(losses[3:])}
    )
