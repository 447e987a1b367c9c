"""How often each level of noise is drawn: as diffusers' scripts draw them."""

import numpy as np
import pytest
import torch
from diffusers.training_utils import compute_density_for_timestep_sampling
from tolerances import assert_close

from configs.errors import Refused
from configs.settings.train_parts import TimestepSampling
from runtimes.objective.random_draws import (
    level_at,
    level_bounds,
    level_probabilities,
    logit_normal_probabilities,
)


def biased(bias: str, count: int = 1000, **more: object) -> np.ndarray:
    settings = TimestepSampling(bias_strategy=bias, bias_multiplier=3.0, **more)  # type: ignore[arg-type]
    return level_probabilities(settings, count)


@pytest.mark.parametrize(
    ("bias", "more", "often"),
    [
        ("earlier", {"bias_portion": 0.25}, slice(0, 250)),
        ("later", {"bias_portion": 0.25}, slice(750, 1000)),
        ("range", {"bias_begin": 200, "bias_end": 450}, slice(200, 450)),
    ],
)
def test_a_bias_is_that_of_the_sdxl_script(bias: str, more: dict, often: slice) -> None:
    """Weights of 1, those of the bias times the multiplier, normalised."""
    expected = np.full(1000, 1 / 1500)
    expected[often] = 3 / 1500
    assert_close(biased(bias, **more), expected, "float64")


def test_a_portion_is_rounded_down_and_a_range_has_no_end() -> None:
    assert (biased("later", 10, bias_portion=0.39) > 0.1).tolist() == [False] * 7 + [True] * 3
    assert (biased("range", 10, bias_begin=0, bias_end=1) > 0.1).tolist() == [True] + [False] * 9


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.5, 0.6), (-1.0, 1.4)])
def test_logit_normal_is_diffusers(mean: float, std: float) -> None:
    u = compute_density_for_timestep_sampling(
        "logit_normal", 400_000, mean, std, generator=torch.Generator().manual_seed(0)
    )
    drawn = np.bincount((u * 20).long(), minlength=20) / 400_000
    np.testing.assert_allclose(logit_normal_probabilities(mean, std, 20), drawn, atol=3e-3)
    fine = logit_normal_probabilities(mean, std, 1000)
    assert fine.sum() == pytest.approx(1) and fine.min() >= 0
    np.testing.assert_allclose(fine.reshape(20, 50).sum(axis=1), drawn, atol=3e-3)


def test_a_logit_mean_is_that_of_diffusers_script() -> None:
    """There u counts down from pure noise: a mean above 0 draws less of it."""
    u = compute_density_for_timestep_sampling(
        "logit_normal", 400_000, 0.5, 0.6, generator=torch.Generator().manual_seed(0)
    )
    level = 19 - (u * 20).long()  # of noise_scheduler.timesteps, from the noisiest on
    drawn = np.bincount(level, minlength=20) / 400_000
    settings = TimestepSampling(distribution="logit_normal", logit_mean=0.5, logit_std=0.6)
    np.testing.assert_allclose(level_probabilities(settings, 20), drawn, atol=3e-3)


def test_logit_normal_and_bias_go_together() -> None:
    settings = TimestepSampling(
        distribution="logit_normal", bias_strategy="later", bias_multiplier=2.0, bias_portion=0.5
    )
    np.testing.assert_allclose(level_probabilities(settings, 2), [1 / 3, 2 / 3])


def test_levels_are_drawn_as_often_as_they_should_be() -> None:
    bounds = level_bounds(
        TimestepSampling(bias_strategy="earlier", bias_multiplier=3.0, bias_portion=0.25), 8
    )
    assert bounds is not None
    drawn = [level_at(u, bounds) for u in (np.arange(12_000) + 0.5) / 12_000]
    assert np.bincount(drawn).tolist() == [3000, 3000, *[1000] * 6]
    assert level_at(0.0, bounds) == 0 and level_at(np.nextafter(1, 0), bounds) == 7


def test_drawing_all_alike_needs_no_table() -> None:
    assert level_bounds(TimestepSampling(), 1000) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"bias_strategy": "range", "bias_begin": 200, "bias_end": 1001},
            "bias_begin and bias_end: 200 to 1001 is no range",
        ),
        (
            {"bias_strategy": "range", "bias_begin": 500, "bias_end": 500},
            "bias_begin and bias_end: 500 to 500 is no range",
        ),
        ({"bias_strategy": "later", "bias_portion": 0.0}, "bias_portion: 1000 to 1000 is no range"),
    ],
)
def test_a_bias_outside_of_the_schedule_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(Refused, match=rf"train\.timesteps\.{message}"):
        level_bounds(TimestepSampling(bias_multiplier=2.0, **settings), 1000)
