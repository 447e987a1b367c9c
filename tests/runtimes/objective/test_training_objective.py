"""The objective: what is drawn for a sample, by what settings, and which go together."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from tolerances import assert_close

from artifacts.latent_shards import LatentScale
from configs.errors import Refused
from configs.settings.train import Train
from configs.settings.train_parts import Huber, TimestepSampling
from runtimes.objective.noise_schedule import FlowSchedule, NoiseSchedule, ResolutionShift
from runtimes.objective.training_objective import Objective, elementwise_loss

SCALED = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
ZERO_SNR = {**SCALED, "rescale_betas_zero_snr": True}
SCALE = LatentScale(0.5)
LEVELS = np.array([0, 1, 10, 250, 399], np.int32)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def diffusion(config: dict | None = None, **settings: object) -> Objective:
    schedule = NoiseSchedule.from_config(SCALED if config is None else config)
    return Objective(schedule, SCALE, seed=3, **settings)  # type: ignore[arg-type]


def flow(**settings: object) -> Objective:
    return Objective(FlowSchedule.from_config({"shift": 3.0}), SCALE, seed=3, **settings)  # type: ignore[arg-type]


BOTH = pytest.mark.parametrize("make", [diffusion, flow])
Make = Callable[..., Objective]


def test_posterior_sample_is_diffusers() -> None:
    mean, logvar, eps = normal(2, 4, 8, 8), 15 * normal(2, 4, 8, 8, seed=1), normal(2, 4, 8, 8)
    moments = torch.cat([torch.from_numpy(mean), torch.from_numpy(logvar)], dim=1)
    theirs = DiagonalGaussianDistribution(moments)
    expected = (theirs.mean + theirs.std * torch.from_numpy(eps)) * 0.13
    assert_close(LatentScale(0.13).sample(mean, logvar, eps), expected)


def test_without_draws_latents_are_the_mean() -> None:
    mean, logvar, eps = normal(2, 4, 8, 8), normal(2, 4, 8, 8, seed=1), normal(2, 4, 8, 8)
    found = LatentScale.from_info({"scaling_factor": 0.5}, draws=False).sample(mean, logvar, eps)
    np.testing.assert_equal(found, mean * np.float32(0.5))


def test_shift_and_per_channel_statistics() -> None:
    mean, logvar, eps = (
        normal(1, 2, 3, 3),
        np.full((1, 2, 3, 3), -50, np.float32),
        normal(1, 2, 3, 3),
    )
    shifted = LatentScale(0.5, shift_factor=0.25).sample(mean, logvar, eps)
    assert_close(shifted, (mean - 0.25) * 0.5)
    normed = LatentScale(0.5, mean=[1.0, 2.0], std=[2.0, 4.0]).sample(mean, logvar, eps)
    assert_close(normed[0, 1], (mean[0, 1] - 2) / 4 * 0.5)


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
def test_target_and_noisy_latents_come_from_one_draw(kind: str) -> None:
    mean, logvar = normal(5, 4, 8, 8), np.full((5, 4, 8, 8), -60, np.float32)
    ours = diffusion({**SCALED, "prediction_type": kind})
    noised = ours.noised(mean, logvar, LEVELS, range(5))
    eps, latents = torch.from_numpy(ours.noise(range(5), (4, 8, 8))), torch.from_numpy(mean * 0.5)
    theirs, t = DDPMScheduler(**SCALED), torch.from_numpy(LEVELS)
    velocity = theirs.get_velocity(latents, eps, t)
    expected = {"epsilon": eps, "sample": latents, "v_prediction": velocity}[kind]
    assert_close(noised.target, expected)
    assert_close(noised.noisy_latents, theirs.add_noise(latents, eps, t))
    assert noised.timesteps.dtype == np.int32 and noised.timesteps.tolist() == LEVELS.tolist()


def test_a_flow_tells_the_denoiser_a_thousand_sigma() -> None:
    mean, logvar = normal(5, 4, 8, 8), np.full((5, 4, 8, 8), -60, np.float32)
    ours = flow(weighting_scheme="cosmap")
    noised = ours.noised(mean, logvar, LEVELS, range(5))
    eps, latents = ours.noise(range(5), (4, 8, 8)), mean * 0.5
    sigma = noised.timesteps[:, None, None, None] / 1000
    assert_close(noised.target, eps - latents)
    assert_close(noised.noisy_latents, latents + sigma * (eps - latents))
    assert noised.timesteps.dtype == np.float32
    assert noised.timesteps[0] == pytest.approx(1000 * 0.003 / 1.002)  # 3 s / (1 + 2 s) at 0.001
    assert len(set(noised.weight.tolist())) == 5


@BOTH
def test_what_is_drawn_depends_on_the_sample_counter_alone(make: Make) -> None:
    mean, logvar = normal(4, 4, 8, 8), normal(4, 4, 8, 8)
    settings = {"noise_offset": 0.1, "input_perturbation": 0.1}
    whole = make(**settings).noised(mean, logvar, LEVELS[:4], [10, 11, 12, 13])
    half = make(**settings).noised(mean[2:], logvar[2:], LEVELS[2:4], [12, 13])
    np.testing.assert_array_equal(whole.noisy_latents[2:], half.noisy_latents)
    np.testing.assert_array_equal(whole.target[2:], half.target)


def test_plain_settings_draw_what_they_drew_in_every_version() -> None:
    """Computed by the first version: runs it made go on as they began."""
    ours, counters = diffusion(), range(40, 44)
    choices = ours.choices(counters)
    assert [c.level for c in choices] == [966, 15, 87, 668]
    captions = [0.03535316, 0.82560209, 0.21982206, 0.61534305]
    np.testing.assert_allclose([c.caption for c in choices], captions, rtol=1e-7)
    mean = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 2, 2, 2)
    levels = np.array([c.level for c in choices], np.int32)
    noised = ours.noised(mean, mean - 2, levels, counters)
    noisy = [-0.9454178, -0.1447998, -0.05416436, -0.29624087]
    assert_close(noised.noisy_latents[:, 0, 0, 0], noisy)
    target = [0.8463097, 0.4572182, -1.7068881, 1.5814161]
    assert_close(noised.target[:, 1, 1, 1], target)
    assert noised.weight.tolist() == [1.0] * 4


def test_noise_offset_shifts_whole_channels_and_no_other_draw() -> None:
    plain = diffusion().noise(range(2000), (4, 2, 2))
    shift = diffusion(noise_offset=0.1).noise(range(2000), (4, 2, 2)) - plain
    assert_close(shift, shift[:, :, :1, :1].repeat(2, 2).repeat(2, 3))
    assert shift.std() == pytest.approx(0.1, rel=0.05)
    among_channels = np.corrcoef(shift[:, :, 0, 0].T)
    assert np.abs(among_channels - np.eye(4)).max() < 0.1  # each has its own


@BOTH
def test_input_perturbation_goes_into_the_model_and_not_into_the_target(make: Make) -> None:
    """As train_text_to_image.py has it: the noisy latents are made of noise + p * more noise."""
    mean, logvar = normal(500, 4, 2, 2), np.full((500, 4, 2, 2), -60, np.float32)
    levels, counters = np.full(500, 800, np.int32), range(500)
    plain = make().noised(mean, logvar, levels, counters)
    perturbed = make(input_perturbation=0.1).noised(mean, logvar, levels, counters)
    np.testing.assert_array_equal(perturbed.target, plain.target)
    schedule = make().schedule
    zeros = np.zeros((1, 1, 1, 1), np.float32)
    noise_scale = schedule.add_noise(zeros, zeros + 1, levels[:1]).item()
    more = (perturbed.noisy_latents - plain.noisy_latents) / noise_scale
    assert more.std() == pytest.approx(0.1, rel=0.05) and abs(more.mean()) < 0.005
    noise = make().noise(counters, (4, 2, 2))
    assert abs(np.corrcoef(more.ravel(), noise.ravel())[0, 1]) < 0.05


def test_choices_are_uniform_and_dropout_moves_no_other_choice() -> None:
    none, some = diffusion(), diffusion(caption_dropout_rate=0.3)
    drawn = list(zip(none.choices(range(4000)), some.choices(range(4000)), strict=True))
    assert all((a.level, a.caption) == (b.level, b.caption) for a, b in drawn)
    assert not any(a.dropped for a, _ in drawn)
    assert np.mean([b.dropped for _, b in drawn]) == pytest.approx(0.3, abs=0.03)
    levels = [a.level for a, _ in drawn]
    assert min(levels) == 0 and max(levels) <= 999
    counts = np.histogram(levels, bins=10, range=(0, 1000))[0]
    assert counts.min() > 320 and counts.max() < 480


@BOTH
def test_how_timesteps_are_drawn_moves_no_other_choice(make: Make) -> None:
    settings = TimestepSampling(
        distribution="logit_normal", logit_mean=-1.0, bias_strategy="later", bias_multiplier=2.0
    )
    none, some = make(), make(sampling=settings)
    drawn = list(zip(none.choices(range(1000)), some.choices(range(1000)), strict=True))
    assert all((a.caption, a.dropped) == (b.caption, b.dropped) for a, b in drawn)
    assert np.mean([b.level for _, b in drawn]) > 700
    noisy = none.schedule.timesteps(np.array([b.level for _, b in drawn], np.int32))
    plain = none.schedule.timesteps(np.array([a.level for a, _ in drawn], np.int32))
    assert noisy.mean() > plain.mean() + 100  # a mean below 0, and later, are noisier for both


def test_what_is_held_out_is_measured_plainly() -> None:
    sampling = TimestepSampling(bias_strategy="later", bias_multiplier=9.0)
    trained = diffusion(
        snr_gamma=5.0,
        noise_offset=0.1,
        input_perturbation=0.1,
        caption_dropout_rate=0.5,
        sampling=sampling,
    )
    assert trained.held_out(9) == Objective(trained.schedule, SCALE, 9, noise_offset=0.1)


def test_equidistant_levels_have_equal_counts_in_the_middles_of_bands() -> None:
    schedule = diffusion().schedule
    assert len(schedule) == 1000
    random, banded = (Objective(schedule, SCALE, 3, equidistant_levels=n) for n in (None, 8))
    levels = [choice.level for choice in banded.choices(range(24))]
    assert levels == [62, 187, 312, 437, 562, 687, 812, 937] * 3
    for ours, theirs in zip(banded.choices(range(9)), random.choices(range(9)), strict=True):
        assert (ours.caption, ours.flip, ours.mask) == (theirs.caption, theirs.flip, theirs.mask)


def test_a_recipe_says_all_of_it() -> None:
    settings = Train(
        seed=5,
        debiased_estimation_loss=True,
        noise_offset=0.1,
        input_perturbation=0.2,
        caption_dropout_rate=0.3,
        timesteps=TimestepSampling(bias_strategy="earlier", bias_multiplier=2.0),
    )
    schedule = NoiseSchedule.from_config(SCALED)
    assert Objective.of(settings, schedule, SCALE) == Objective(
        schedule,
        SCALE,
        5,
        debiased_estimation_loss=True,
        noise_offset=0.1,
        input_perturbation=0.2,
        sampling=TimestepSampling(bias_strategy="earlier", bias_multiplier=2.0),
        caption_dropout_rate=0.3,
    )
    weighted = Objective.of(Train(weighting_scheme="cosmap"), FlowSchedule.from_config({}), SCALE)
    assert weighted.weighting_scheme == "cosmap"
    assert Objective.of(Train(snr_gamma=5.0), schedule, SCALE).snr_gamma == 5.0


DYNAMIC = {"use_dynamic_shifting": True}


def test_a_shift_by_resolution_needs_a_scheduler_that_has_one() -> None:
    shifting = Train(timesteps=TimestepSampling(resolution_shift=True))
    plain = FlowSchedule.from_config(DYNAMIC)
    with pytest.raises(Refused, match="resolution_shift: the base's scheduler has no use_dyn"):
        Objective.of(shifting, plain, SCALE)
    shift = ResolutionShift(256, 4096, 0.5, 1.15, True, 2)
    shifted = Objective.of(shifting, plain, SCALE, shift)
    levels, zeros = np.array([500], np.int32), np.zeros((1, 4, 64, 64), np.float32)
    at = [o.noised(zeros, zeros, levels, [0]).timesteps[0] for o in (shifted, shifted.held_out(1))]
    assert at[0] == pytest.approx(1000 * plain.shifted(shift, 64, 64).sigmas[500])
    assert at[1] == pytest.approx(501) and at[0] > 600, "the held-out loss is not shifted"
    assert Objective.of(Train(), plain, SCALE, shift).resolution_shift is None
    stretched = ResolutionShift.from_config({**DYNAMIC, "shift_terminal": 0.02}, 2)
    assert Objective.of(shifting, plain, SCALE, stretched).resolution_shift == shift


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (diffusion, {"config": ZERO_SNR}, r"set train\.prediction_type to v_prediction"),
        (diffusion, {"weighting_scheme": "cosmap"}, r"train\.weighting_scheme: cosmap is for flow"),
        (flow, {"snr_gamma": 5.0}, r"train\.snr_gamma weighs diffusion by its SNR"),
        (
            flow,
            {"debiased_estimation_loss": True},
            r"train\.debiased_estimation_loss weighs diffusion by its SNR",
        ),
        (
            flow,
            {
                "sampling": TimestepSampling(
                    bias_strategy="range", bias_multiplier=2.0, bias_begin=1000, bias_end=1200
                )
            },
            r"train\.timesteps\.bias_begin and bias_end: 1000 to 1200",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    make: Make, settings: dict, message: str
) -> None:
    with pytest.raises(Refused, match=message):
        make(**settings)


def kohyas_delta(levels: np.ndarray, kind: str, delta: float, scale: float) -> torch.Tensor:
    """`get_huber_threshold_if_needed` of kohya's sd-scripts, as published, for diffusion."""
    scheduler = DDPMScheduler.from_config(SCALED)
    timesteps = torch.from_numpy(levels).long()
    if kind == "exponential":
        rate = -np.log(delta) / scheduler.config.num_train_timesteps
        return torch.exp(-rate * timesteps) * scale
    if kind == "snr":
        kept = scheduler.alphas_cumprod[timesteps]
        return (1 - delta) / (1 + ((1 - kept) / kept) ** 0.5) ** 2 + delta
    return torch.full((len(levels),), delta * scale)


@pytest.mark.parametrize("loss", ["huber", "smooth_l1"])
@pytest.mark.parametrize("kind", ["constant", "exponential", "snr"])
def test_huber_and_smooth_l1_are_kohyas(loss: str, kind: str) -> None:
    huber = Huber(schedule=kind, delta=0.2, scale=1.0 if kind == "snr" else 1.5)
    mean = normal(5, 4, 8, 8)
    noised = diffusion(loss=loss, huber=huber).noised(mean, mean, LEVELS, range(5))
    errors = normal(5, 4, 8, 8, seed=2)
    delta = kohyas_delta(LEVELS, kind, huber.delta, huber.scale).view(-1, 1, 1, 1)
    factor = delta if loss == "huber" else 1
    expected = 2 * factor * (torch.sqrt(torch.from_numpy(errors) ** 2 + delta**2) - delta)
    found = elementwise_loss(errors**2, noised.huber_delta) * noised.weight[:, None, None, None]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_flow_has_no_snr_for_huber() -> None:
    settings = Train(loss="huber", huber={"schedule": "snr"})
    with pytest.raises(Refused, match=r"huber\.schedule"):
        Objective.of(settings, FlowSchedule.from_config({}), SCALE)
    timed = flow(loss="huber", huber=Huber(schedule="exponential"))
    deltas = timed.noised(normal(5, 1, 2, 2), normal(5, 1, 2, 2), LEVELS, range(5)).huber_delta
    assert_close(deltas, 0.1 ** timed.schedule.sigmas[LEVELS])
    assert timed.held_out(1).loss == "mse"
