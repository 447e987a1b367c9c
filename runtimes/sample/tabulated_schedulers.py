"""Convert a diffusers scheduler to a table of coefficients, for runtimes that compile a step.

The coefficients are inputs of the compiled step, so one program serves every step. With noisy
latents x and the denoiser's output m for the input `row.scale * x`, a step computes

    x0   = row.x0_x * x + row.x0_m * m            the predicted original (pred_original_sample)
    next = row.next_x * x + row.next_x0 * x0 + row.next_before * (x0 of the previous step)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.errors import Refused


@dataclass(frozen=True)
class StepCoefficients:
    """Coefficients of one sampling step; the module docstring gives the equations."""

    scale: float  # scales the denoiser's input (scale_model_input of diffusers)
    x0_x: float
    x0_m: float
    next_x: float
    next_x0: float
    next_before: float = 0.0


@dataclass(frozen=True)
class SchedulerTable:
    """Coefficients of all N steps of a scheduler."""

    start: float  # scales the initial standard normal noise (init_noise_sigma of diffusers)
    timesteps: NDArray[np.float32]  # [N], in the denoiser's units
    rows: NDArray[np.float32]  # [N, 6], StepCoefficients in order


def tabulate(
    scheduler: Any, steps: int, sigmas: NDArray[np.float64] | None = None, mu: float | None = None
) -> SchedulerTable:
    """Tabulate the coefficients of a diffusers scheduler.

    Supported: DDIM (arXiv 2010.02502, eta 0), Euler on sigmas (arXiv 2206.00364, without churn) and
    on flows, and multistep DPM-Solver++ of order 1 and 2 (arXiv 2211.01095).

    Args:
        scheduler: a diffusers scheduler; `set_timesteps` changes its state.
        steps: number of inference steps N.
        sigmas: noise levels [N], where the family's pipeline defines its own.
        mu: shift of the noise levels, for a scheduler with dynamic shifting.

    Raises:
        Refused: the scheduler or one of its options has no such table, or `steps` is invalid.
    """
    name = type(scheduler).__name__
    if name not in _ROWS:
        known = ", ".join(_ROWS)
        raise Refused(f"the scheduler {name} has no table of coefficients (supported: {known})")
    flags = ("clip_sample", "invert_sigmas", "stochastic_sampling", "thresholding")
    for option in (*flags, "use_flow_sigmas"):
        if scheduler.config.get(option):
            raise Refused(f"the scheduler {name} with {option} has no table: turn it off")
    spacing = {"num_inference_steps": steps} if sigmas is None else {"sigmas": sigmas}
    try:
        scheduler.set_timesteps(**spacing, **({} if mu is None else {"mu": mu}))
    except ValueError as error:
        raise Refused(f"num_inference_steps: {steps}: {error}") from None
    start = float(getattr(scheduler, "init_noise_sigma", 1.0))
    rows = np.array([astuple(row) for row in _ROWS[name](scheduler)], np.float32)
    return SchedulerTable(start, np.asarray(scheduler.timesteps, np.float32), rows)


def scheduler_step(latents: Any, previous: Any, output: Any, row: Sequence[Any]) -> tuple[Any, Any]:
    """One step of a tabulated scheduler, with the equations of the module docstring.

    Args:
        latents: noisy latents x [B, C, h, w]; an array of any library.
        previous: x0 of the previous step [B, C, h, w]; zeros in the first step.
        output: m, the denoiser's output [B, C, h, w] for the input `row.scale * x`.
        row: the 6 StepCoefficients, in order.

    Returns:
        The next latents and x0, both [B, C, h, w].
    """
    _, x0_x, x0_m, next_x, next_x0, next_before = row
    predicted_original = x0_x * latents + x0_m * output
    following = next_x * latents + next_x0 * predicted_original + next_before * previous
    return following, predicted_original


def _predicted_original(kind: str, alpha: float, sigma: float) -> tuple[float, float]:
    """Coefficients (a, b) of x0 = a x + b m, where x = alpha x0 + sigma eps."""
    if kind == "epsilon":
        if not alpha:
            raise Refused("prediction_type epsilon cannot be drawn from zero terminal SNR")
        return 1 / alpha, -sigma / alpha
    if kind == "v_prediction":  # arXiv 2202.00512; requires alpha^2 + sigma^2 = 1
        return alpha, -sigma
    if kind == "sample":
        return 0.0, 1.0
    raise Refused(f"prediction_type {kind!r} is not known here")


def _ddim(scheduler: Any) -> list[StepCoefficients]:
    """Equation 12 of arXiv 2010.02502 with eta 0."""
    config = scheduler.config
    table = scheduler.alphas_cumprod.double()
    stride = config.num_train_timesteps // scheduler.num_inference_steps
    rows = []
    for t in scheduler.timesteps.tolist():
        now = float(table[t])
        after = float(table[t - stride] if t >= stride else scheduler.final_alpha_cumprod)
        alpha = math.sqrt(now)
        sigma = math.sqrt(1 - now)
        # The next x keeps eps = (x - alpha x0) / sigma, scaled by the next sigma.
        noise = math.sqrt(1 - after) / sigma
        predicted = _predicted_original(config.prediction_type, alpha, sigma)
        rows.append(StepCoefficients(1.0, *predicted, noise, math.sqrt(after) - noise * alpha))
    return rows


def _euler(scheduler: Any) -> list[StepCoefficients]:
    """Euler steps on x = x0 + sigma eps; the denoiser's input is scaled to unit variance."""
    sigmas = scheduler.sigmas.double().tolist()
    rows = []
    for now, after in pairwise(sigmas):
        scale = 1 / math.sqrt(now**2 + 1)
        a, b = _predicted_original(scheduler.config.prediction_type, scale, now * scale)
        rows.append(StepCoefficients(scale, a * scale, b, after / now, 1 - after / now))
    return rows


def _flow(scheduler: Any) -> list[StepCoefficients]:
    """Euler steps on a rectified flow: x = (1 - sigma) x0 + sigma eps, and m = eps - x0."""
    sigmas = scheduler.sigmas.double().tolist()
    return [
        StepCoefficients(1.0, 1.0, -now, after / now, 1 - after / now)
        for now, after in pairwise(sigmas)
    ]


def _dpm(scheduler: Any) -> list[StepCoefficients]:
    """DPM-Solver++(2M), algorithm 2 of arXiv 2211.01095, or order 1."""
    config = scheduler.config
    if config.algorithm_type != "dpmsolver++" or config.solver_order > 2:
        raise Refused("DPMSolverMultistepScheduler has a table for dpmsolver++ of order 1 or 2")
    if config.solver_order == 2 and config.solver_type != "midpoint":
        raise Refused(f"solver_type {config.solver_type} has no table: set midpoint")
    levels = []
    for sigma in scheduler.sigmas.double().tolist():
        alpha = 1 / math.sqrt(sigma**2 + 1)
        levels.append((alpha, sigma * alpha, -math.log(sigma) if sigma else math.inf))
    count = len(levels) - 1
    rows = list[StepCoefficients]()
    for n in range(count):
        (alpha, sigma, now) = levels[n]
        (alpha_next, sigma_next, after) = levels[n + 1]
        step = alpha_next * -math.expm1(now - after)
        a, b = _predicted_original(config.prediction_type, alpha, sigma)
        last = n == count - 1 and (
            config.euler_at_final
            or (config.lower_order_final and count < 15)
            or config.final_sigmas_type == "zero"
        )
        more = 0.0
        if config.solver_order == 2 and n > 0 and not last:
            more = step * (after - now) / (now - levels[n - 1][2]) / 2
        rows.append(StepCoefficients(1.0, a, b, sigma_next / sigma, step + more, -more))
    return rows


_ROWS = {
    "DDIMScheduler": _ddim,
    "EulerDiscreteScheduler": _euler,
    "FlowMatchEulerDiscreteScheduler": _flow,
    "DPMSolverMultistepScheduler": _dpm,
}
