"""The objective's formulas, against diffusers where it has them."""

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.training_utils import compute_snr

from runtimes.base import WrongInput
from runtimes.objective import LatentScale, NoiseSchedule, Objective, min_snr_weight

SCALED = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
CONFIGS = [
    {**SCALED},
    {**SCALED, "rescale_betas_zero_snr": True, "prediction_type": "v_prediction"},
    {"beta_schedule": "linear"},
    {"beta_schedule": "squaredcos_cap_v2", "num_train_timesteps": 400},
]
SCALE = LatentScale(0.5)
T = np.array([0, 1, 10, 250, 399], np.int32)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def objective(config: dict | None = None, **settings: object) -> Objective:
    schedule = NoiseSchedule.from_config(CONFIGS[0] if config is None else config)
    return Objective(schedule, SCALE, seed=3, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("config", CONFIGS)
def test_schedule_noise_and_velocity_are_diffusers(config: dict) -> None:
    ours, theirs = NoiseSchedule.from_config(config), DDPMScheduler(**config)
    np.testing.assert_allclose(ours.alphas_cumprod, theirs.alphas_cumprod, rtol=1e-6)
    z, eps = normal(5, 4, 8, 8), normal(5, 4, 8, 8, seed=1)
    tensors = torch.from_numpy(z), torch.from_numpy(eps), torch.from_numpy(T)
    noisy, velocity = theirs.add_noise(*tensors), theirs.get_velocity(*tensors)
    np.testing.assert_allclose(ours.add_noise(z, eps, T), noisy, atol=1e-5)
    np.testing.assert_allclose(ours.velocity(z, eps, T), velocity, atol=1e-5)
    np.testing.assert_allclose(ours.snr(T), compute_snr(theirs, tensors[2]), rtol=1e-4)


def test_zero_terminal_snr_ends_at_zero_and_keeps_the_first() -> None:
    plain, rescaled = (NoiseSchedule.from_config(c).alphas_cumprod for c in CONFIGS[:2])
    assert rescaled[-1] == 0 and rescaled[0] == pytest.approx(plain[0], rel=1e-6)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(WrongInput, match="beta_schedule 'cosine' is not known"):
        NoiseSchedule.from_config({"beta_schedule": "cosine"})


def test_min_snr_weighs_each_sample_by_its_own_snr() -> None:
    """The formula of diffusers' training scripts, sample by sample."""
    snr = torch.tensor([0.01, 1.0, 5.0, 100.0, 2000.0])
    clipped = torch.stack([snr, 5.0 * torch.ones_like(snr)], dim=1).min(dim=1)[0]
    epsilon = min_snr_weight(snr.numpy(), 5.0, "epsilon")
    velocity = min_snr_weight(snr.numpy(), 5.0, "v_prediction")
    np.testing.assert_allclose(epsilon, clipped / snr, rtol=1e-6)
    np.testing.assert_allclose(velocity, clipped / (snr + 1), rtol=1e-6)


def test_min_snr_is_finite_where_the_snr_is_zero_or_endless() -> None:
    ends = np.array([0.0, np.float32(1e30)], np.float32)
    assert min_snr_weight(ends, 5.0, "epsilon").tolist() == pytest.approx([1, 0])
    assert min_snr_weight(ends, 5.0, "v_prediction").tolist() == pytest.approx([0, 0])
    last = np.array([999], np.int32)
    assert objective(CONFIGS[1], snr_gamma=5.0).weight(last).tolist() == [0.0]


def test_posterior_sample_is_diffusers() -> None:
    mean, logvar, eps = normal(2, 4, 8, 8), 15 * normal(2, 4, 8, 8, seed=1), normal(2, 4, 8, 8)
    moments = torch.cat([torch.from_numpy(mean), torch.from_numpy(logvar)], dim=1)
    theirs = DiagonalGaussianDistribution(moments)
    expected = (theirs.mean + theirs.std * torch.from_numpy(eps)) * 0.13
    np.testing.assert_allclose(LatentScale(0.13).sample(mean, logvar, eps), expected, rtol=1e-5)


def test_shift_and_per_channel_statistics() -> None:
    mean, logvar, eps = (
        normal(1, 2, 3, 3),
        np.full((1, 2, 3, 3), -50, np.float32),
        normal(1, 2, 3, 3),
    )
    shifted = LatentScale(0.5, shift_factor=0.25).sample(mean, logvar, eps)
    np.testing.assert_allclose(shifted, (mean - 0.25) * 0.5, atol=1e-5)
    normed = LatentScale(0.5, mean=[1.0, 2.0], std=[2.0, 4.0]).sample(mean, logvar, eps)
    np.testing.assert_allclose(normed[0, 1], (mean[0, 1] - 2) / 4 * 0.5, atol=1e-5)


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
def test_target_and_noisy_latents_come_from_one_draw(kind: str) -> None:
    mean, logvar = normal(5, 4, 8, 8), np.full((5, 4, 8, 8), -60, np.float32)
    ours = objective(prediction_type=kind)
    noised = ours.noised(mean, logvar, T, range(5))
    eps = torch.from_numpy(ours.noise(range(5), (4, 8, 8)))
    theirs, latents = DDPMScheduler(**SCALED), torch.from_numpy(mean * 0.5)
    t = torch.from_numpy(T)
    expected = eps if kind == "epsilon" else theirs.get_velocity(latents, eps, t)
    np.testing.assert_allclose(noised.target, expected, atol=1e-5)
    np.testing.assert_allclose(noised.noisy_latents, theirs.add_noise(latents, eps, t), atol=1e-5)


def test_what_is_drawn_depends_on_the_sample_counter_alone() -> None:
    mean, logvar = normal(4, 4, 8, 8), normal(4, 4, 8, 8)
    whole = objective().noised(mean, logvar, T[:4], [10, 11, 12, 13])
    half = objective().noised(mean[2:], logvar[2:], T[2:4], [12, 13])
    np.testing.assert_array_equal(whole.noisy_latents[2:], half.noisy_latents)


def test_noise_offset_shifts_whole_channels_and_no_other_draw() -> None:
    plain = objective().noise(range(2000), (4, 2, 2))
    shift = objective(noise_offset=0.1).noise(range(2000), (4, 2, 2)) - plain
    np.testing.assert_allclose(shift, shift[:, :, :1, :1].repeat(2, 2).repeat(2, 3), atol=1e-6)
    assert shift.std() == pytest.approx(0.1, rel=0.05)


def test_choices_are_uniform_and_dropout_moves_no_other_choice() -> None:
    none, some = objective(), objective(caption_dropout=0.3)
    drawn = [(none.choices(n), some.choices(n)) for n in range(4000)]
    assert all((a.timestep, a.caption) == (b.timestep, b.caption) for a, b in drawn)
    assert not any(a.dropped for a, _ in drawn)
    assert np.mean([b.dropped for _, b in drawn]) == pytest.approx(0.3, abs=0.03)
    timesteps = [a.timestep for a, _ in drawn]
    assert min(timesteps) == 0 and max(timesteps) <= 999
    counts = np.histogram(timesteps, bins=10, range=(0, 1000))[0]
    assert counts.min() > 320 and counts.max() < 480


def test_epsilon_with_zero_terminal_snr_is_refused() -> None:
    with pytest.raises(WrongInput, match=r"set train\.prediction_type to v_prediction"):
        objective(CONFIGS[1], prediction_type="epsilon")
    assert objective(CONFIGS[1]).prediction_type == "v_prediction"
