"""A scheduler's table takes the steps that the scheduler takes."""

from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from configs.errors import Refused
from runtimes.sample.tabulated_schedulers import tabulate

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddim": ("DDIMScheduler", {**SD, "clip_sample": False, "steps_offset": 1}),
    "ddim, zero terminal SNR": (
        "DDIMScheduler",
        {
            **SD,
            "clip_sample": False,
            "prediction_type": "v_prediction",
            "rescale_betas_zero_snr": True,
            "timestep_spacing": "trailing",
        },
    ),
    "ddim, sample": ("DDIMScheduler", {**SD, "clip_sample": False, "prediction_type": "sample"}),
    "euler": ("EulerDiscreteScheduler", {**SD, "steps_offset": 1, "timestep_spacing": "leading"}),
    "euler, v": ("EulerDiscreteScheduler", {**SD, "prediction_type": "v_prediction"}),
    "euler, karras": ("EulerDiscreteScheduler", {**SD, "use_karras_sigmas": True}),
    "dpm++": ("DPMSolverMultistepScheduler", SD),
    "dpm++, order 1": ("DPMSolverMultistepScheduler", {**SD, "solver_order": 1}),
    "dpm++, v, karras": (
        "DPMSolverMultistepScheduler",
        {**SD, "prediction_type": "v_prediction", "use_karras_sigmas": True},
    ),
    "flow": ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
}


def denoiser(x: torch.Tensor, timestep: float) -> torch.Tensor:
    """Something smooth that depends on both, in place of a network."""
    return torch.tanh(x * (0.5 + timestep / 2000)) + 0.1 * x.flip(0)


@pytest.mark.parametrize("steps", [4, 20])
@pytest.mark.parametrize("case", CASES)
def test_it_ends_where_the_scheduler_ends(case: str, steps: int) -> None:
    name, config = CASES[case]
    scheduler = getattr(diffusers, name)(**config)
    noise = torch.randn(64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    scheduler.set_timesteps(steps)
    expected = noise * getattr(scheduler, "init_noise_sigma", 1.0)
    for t in scheduler.timesteps:
        given = expected
        if hasattr(scheduler, "scale_model_input"):
            given = scheduler.scale_model_input(expected, t)
        expected = scheduler.step(denoiser(given, float(t)), t, expected).prev_sample

    table = tabulate(getattr(diffusers, name)(**config), steps)
    found, before = noise * table.start, torch.zeros_like(noise)
    for t, (scale, x0_x, x0_m, next_x, next_x0, next_before) in zip(
        table.timesteps.tolist(), table.rows.tolist(), strict=True
    ):
        foreseen = x0_x * found + x0_m * denoiser(scale * found, t)
        found = next_x * found + next_x0 * foreseen + next_before * before
        before = foreseen
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("PNDMScheduler", {}, "the scheduler PNDMScheduler has no table"),
        ("DDIMScheduler", {"clip_sample": True}, "with clip_sample has no table"),
        ("DPMSolverMultistepScheduler", {"solver_order": 3}, "order 1 or 2"),
        ("DPMSolverMultistepScheduler", {"solver_type": "heun"}, "set midpoint"),
    ],
)
def test_what_needs_more_is_refused(name: str, config: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        tabulate(getattr(diffusers, name)(**config), 4)
