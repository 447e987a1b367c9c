"""Noise schedules: diffusion's and the flow's, against diffusers' schedulers."""

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.training_utils import compute_snr
from tolerances import assert_close

from configs.errors import Refused
from runtimes.objective.noise_schedule import (
    FlowSchedule,
    NoiseSchedule,
    ResolutionShift,
    schedule_of,
)

SCALED = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
CONFIGS = [
    {**SCALED},
    {**SCALED, "rescale_betas_zero_snr": True, "prediction_type": "v_prediction"},
    {"beta_schedule": "linear"},
    {"beta_schedule": "squaredcos_cap_v2", "num_train_timesteps": 400},
]
FLOWS = [{}, {"shift": 3.0}, {"shift": 3.0, "use_dynamic_shifting": True}]
LEVELS = np.array([0, 1, 10, 250, 399], np.int32)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("config", CONFIGS)
def test_schedule_noise_and_targets_are_diffusers(config: dict) -> None:
    ours, theirs = NoiseSchedule.from_config(config), DDPMScheduler(**config)
    assert_close(ours.alphas_cumprod, theirs.alphas_cumprod)
    z, eps = normal(5, 4, 8, 8), normal(5, 4, 8, 8, seed=1)
    tensors = torch.from_numpy(z), torch.from_numpy(eps), torch.from_numpy(LEVELS)
    assert_close(ours.add_noise(z, eps, LEVELS), theirs.add_noise(*tensors))
    # Of 1 - alphas_cumprod, a thousandth where the noise is least, a chip's last bits are more.
    np.testing.assert_allclose(ours.snr(LEVELS), compute_snr(theirs, tensors[2]), rtol=1e-4)
    expected = {"epsilon": eps, "sample": z, "v_prediction": theirs.get_velocity(*tensors).numpy()}
    for kind, target in expected.items():
        schedule = NoiseSchedule(ours.alphas_cumprod, kind)
        assert_close(schedule.target(z, eps, LEVELS), target)


def test_zero_terminal_snr_ends_at_zero_and_keeps_the_first() -> None:
    plain, rescaled = (NoiseSchedule.from_config(c).alphas_cumprod for c in CONFIGS[:2])
    assert rescaled[-1] == 0
    assert_close(rescaled[0], plain[0])


@pytest.mark.parametrize("config", FLOWS)
def test_the_flow_is_diffusers_to_the_last_bit(config: dict) -> None:
    """The table that SD3's training script takes sigmas and timesteps from, noise first there."""
    ours, theirs = FlowSchedule.from_config(config), FlowMatchEulerDiscreteScheduler(**config)
    levels = np.arange(1000, dtype=np.int32)
    np.testing.assert_array_equal(ours.sigmas[::-1], theirs.sigmas)
    timesteps = ours.timesteps(levels)
    assert timesteps.dtype == np.float32
    np.testing.assert_array_equal(timesteps[::-1], theirs.timesteps)


def test_noise_along_the_flow_and_its_direction() -> None:
    ours = FlowSchedule.from_config({"shift": 3.0})
    theirs = FlowMatchEulerDiscreteScheduler(shift=3.0)
    z, eps = normal(5, 4, 8, 8), normal(5, 4, 8, 8, seed=1)
    noisy = ours.add_noise(z, eps, LEVELS)
    expected = theirs.scale_noise(
        torch.from_numpy(z), torch.from_numpy(ours.timesteps(LEVELS)), torch.from_numpy(eps)
    )
    assert_close(noisy, expected)
    # A perfect prediction leads from any level straight to the picture.
    sigma = ours.sigmas[LEVELS][:, None, None, None]
    assert_close(noisy - sigma * ours.target(z, eps, LEVELS), z)


def test_a_sampler_step_with_the_perfect_direction_ends_at_the_picture() -> None:
    z, eps = normal(1, 4, 8, 8), normal(1, 4, 8, 8, seed=1)
    theirs = FlowMatchEulerDiscreteScheduler(shift=3.0)
    theirs.set_timesteps(4)
    target = torch.from_numpy(FlowSchedule.from_config({}).target(z, eps, LEVELS[:1]))
    latents = torch.from_numpy(eps)
    for t in theirs.timesteps:
        latents = theirs.step(target, t, latents).prev_sample
    assert_close(latents, z)


def test_a_schedule_knows_which_it_is() -> None:
    flow = schedule_of({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0})
    assert isinstance(flow, FlowSchedule) and flow.prediction_type == "flow"
    diffusion = schedule_of({"_class_name": "EulerDiscreteScheduler", **SCALED})
    assert isinstance(diffusion, NoiseSchedule) and diffusion.prediction_type == "epsilon"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"beta_schedule": "cosine"}, "beta_schedule 'cosine' is not known"),
        ({**SCALED, "prediction_type": "flow_prediction"}, "'flow_prediction' is not known"),
        ({"_class_name": "EDMEulerScheduler", "sigma_data": 0.5}, "EDMEulerScheduler is not known"),
    ],
)
def test_an_unknown_schedule_is_refused(config: dict, message: str) -> None:
    with pytest.raises(Refused, match=message):
        schedule_of(config)


@pytest.mark.parametrize("kind", ["exponential", "linear"])
@pytest.mark.parametrize("size", [(32, 32), (128, 96)])
def test_the_shift_by_resolution_is_diffusers(kind: str, size: tuple[int, int]) -> None:
    config = {"shift": 3.0, "use_dynamic_shifting": True, "time_shift_type": kind}
    shift = ResolutionShift.from_config(config, 2)
    assert shift is not None
    mu = calculate_shift(size[0] * size[1] // 4)
    assert shift.mu(*size) == pytest.approx(mu, rel=1e-12)
    schedule, theirs = (FlowSchedule.from_config(config), FlowMatchEulerDiscreteScheduler(**config))
    theirs.set_timesteps(sigmas=schedule.sigmas[::-1].tolist(), mu=mu)
    assert_close(schedule.shifted(shift, *size).sigmas[::-1], theirs.sigmas[:-1].numpy())


def test_only_dynamic_shifting_depends_on_the_resolution() -> None:
    assert ResolutionShift.from_config({"shift": 3.0}, 2) is None
