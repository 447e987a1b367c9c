"""Loss weights, against diffusers' formulas and against each other."""

import numpy as np
import pytest
import torch
from diffusers.training_utils import compute_loss_weighting_for_sd3
from tolerances import assert_close

from runtimes.objective.noise_schedule import FlowSchedule, NoiseSchedule
from runtimes.objective.training_objective import (
    debiased_weight,
    flow_weight,
    loss_weight,
    min_snr_weight,
)

CONFIG = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
KINDS = ("epsilon", "v_prediction", "sample")
LEVELS = np.array([0, 1, 10, 250, 700, 999], np.int32)


def schedule(kind: str = "epsilon", zero_snr: bool = False) -> NoiseSchedule:
    more = {"prediction_type": kind, "rescale_betas_zero_snr": zero_snr}
    return NoiseSchedule.from_config({**CONFIG, **more})


def test_min_snr_weighs_each_sample_by_its_own_snr() -> None:
    """The formula of diffusers' training scripts, sample by sample."""
    snr = torch.tensor([0.01, 1.0, 5.0, 100.0, 2000.0])
    clipped = torch.stack([snr, 5.0 * torch.ones_like(snr)], dim=1).min(dim=1)[0]
    expected = {"epsilon": clipped / snr, "v_prediction": clipped / (snr + 1), "sample": clipped}
    for kind, weight in expected.items():
        assert_close(min_snr_weight(snr.numpy(), 5.0, kind), weight)


def test_min_snr_is_finite_where_the_snr_is_zero_or_endless() -> None:
    ends = np.array([0.0, np.float32(1e30)], np.float32)
    assert min_snr_weight(ends, 5.0, "epsilon").tolist() == pytest.approx([1, 0])
    assert min_snr_weight(ends, 5.0, "v_prediction").tolist() == pytest.approx([0, 0])
    assert min_snr_weight(ends, 5.0, "sample").tolist() == pytest.approx([0, 5])
    last = np.array([999], np.int32)
    assert loss_weight(schedule("v_prediction", True), last, snr_gamma=5.0).tolist() == [0.0]


def test_debiased_is_one_over_the_root_of_the_snr() -> None:
    snr = np.array([0.01, 1.0, 4.0, 100.0], np.float32)
    assert_close(debiased_weight(snr, "epsilon"), [10, 1, 0.5, 0.1])
    weight = loss_weight(schedule(), LEVELS, debiased_estimation_loss=True)
    assert_close(weight, schedule().snr(LEVELS) ** -0.5)


def test_debiased_is_bounded_where_the_snr_is_zero() -> None:
    levels = np.arange(1000, dtype=np.int32)
    velocity = loss_weight(schedule("v_prediction", True), levels, debiased_estimation_loss=True)
    assert velocity[-1] == 0 and velocity.max() <= 0.5
    sample = loss_weight(schedule("sample", True), levels, debiased_estimation_loss=True)
    assert sample[-1] == 0 and np.isfinite(sample).all()


@pytest.mark.parametrize("settings", [{"snr_gamma": 5.0}, {"debiased_estimation_loss": True}])
def test_a_weighting_asks_the_same_of_every_prediction_type(settings: dict) -> None:
    """One guess at the picture, said as picture, noise or velocity, costs the same."""
    rng = np.random.default_rng(0)
    z, eps, guess = (rng.standard_normal((6, 4, 8, 8)).astype(np.float32) for _ in range(3))
    alpha, sigma = schedule().coefficients(LEVELS)
    noise_guess = (schedule().add_noise(z, eps, LEVELS) - alpha * guess) / sigma
    losses = {}
    for kind in KINDS:
        said = schedule(kind).target(guess, noise_guess, LEVELS)
        errors = np.square(said - schedule(kind).target(z, eps, LEVELS)).mean(axis=(1, 2, 3))
        losses[kind] = errors * loss_weight(schedule(kind), LEVELS, **settings)
    np.testing.assert_allclose(losses["v_prediction"], losses["epsilon"], rtol=2e-3)
    np.testing.assert_allclose(losses["sample"], losses["epsilon"], rtol=2e-3)


@pytest.mark.parametrize("kind", ["none", "sigma_sqrt", "cosmap"])
def test_flow_weights_are_diffusers(kind: str) -> None:
    sigmas = FlowSchedule.from_config({"shift": 3.0}).sigmas
    theirs = compute_loss_weighting_for_sd3(kind, torch.from_numpy(sigmas))
    assert_close(flow_weight(sigmas, kind), theirs)  # type: ignore[arg-type]


def test_without_a_weighting_all_weigh_one() -> None:
    for plain in (schedule(), FlowSchedule.from_config({})):
        weight = loss_weight(plain, LEVELS)
        assert weight.dtype == np.float32 and weight.tolist() == [1.0] * 6
