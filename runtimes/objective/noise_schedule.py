"""Noise schedules: the forward process of diffusion and of rectified flow, and their targets.

Both schedules are tables over T noise levels, in order of increasing noise. A `level` is a row
index in [0, T); its `timestep` is the denoiser's input for that level.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtimes.contract import WrongInput
from runtimes.objective.resolution_shift import ResolutionShift

Array = NDArray[np.float32]
Levels = NDArray[np.int32]

#: Of a config's num_train_timesteps; published models have 1000.
MOST_TIMESTEPS = 100_000
DIFFUSION = ("epsilon", "v_prediction", "sample")
FLOW = "flow"


@dataclass(frozen=True)
class NoiseSchedule:
    """The forward process q(z_t | z) = N(alpha_t z, sigma_t^2) (DDPM, arXiv 2006.11239).

    alpha_t^2 = alphas_cumprod[t], sigma_t^2 = 1 - alpha_t^2, SNR(t) = alpha_t^2 / sigma_t^2.
    """

    alphas_cumprod: Array  # [T]
    prediction_type: str  # one of DIFFUSION

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> NoiseSchedule:
        """From a diffusers scheduler's config. Raises WrongInput for an unknown schedule."""
        kind = config.get("prediction_type", "epsilon")
        if kind not in DIFFUSION:
            known = ", ".join(DIFFUSION)
            raise WrongInput(f"the scheduler's prediction_type {kind!r} is not known ({known})")
        betas = _betas(config)
        if config.get("rescale_betas_zero_snr"):
            betas = rescale_zero_terminal_snr(betas)
        return cls(_cumprod(betas), kind)

    def __len__(self) -> int:
        return len(self.alphas_cumprod)

    def timesteps(self, levels: Levels) -> NDArray[np.int32]:
        """The denoiser's timesteps [B] i32, equal to the levels."""
        return levels.astype(np.int32)

    def coefficients(self, levels: Levels) -> tuple[Array, Array]:
        """alpha_t and sigma_t, each [B, 1, 1, 1] f32."""
        a2 = self.alphas_cumprod[levels][:, None, None, None]
        return np.sqrt(a2), np.sqrt(1 - a2)

    def add_noise(self, latents: Array, noise: Array, levels: Levels) -> Array:
        """z_t = alpha_t z + sigma_t eps; all [B, C, h, w] f32, levels [B]."""
        alpha, sigma = self.coefficients(levels)
        return alpha * latents + sigma * noise

    def target(self, latents: Array, noise: Array, levels: Levels) -> Array:
        """The denoiser's target [B, C, h, w] f32 at noise levels [B].

        * epsilon: the noise (DDPM, arXiv 2006.11239);
        * sample: the latents;
        * v_prediction: alpha_t eps - sigma_t z (arXiv 2202.00512, appendix D).

        Args:
            latents: z [B, C, h, w].
            noise: eps [B, C, h, w].
        """
        if self.prediction_type == "epsilon":
            return noise
        if self.prediction_type == "sample":
            return latents
        alpha, sigma = self.coefficients(levels)
        return alpha * noise - sigma * latents

    def snr(self, levels: Levels) -> Array:
        """SNR(t) [B] f32; infinite where alphas_cumprod is 1."""
        a2 = self.alphas_cumprod[levels]
        return a2 / (1 - a2)


@dataclass(frozen=True)
class FlowSchedule:
    """The straight paths z_t = (1 - sigma) z + sigma eps (rectified flow, arXiv 2209.03003)."""

    sigmas: Array  # [T], rising to 1
    prediction_type: str = FLOW

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FlowSchedule:
        """The training sigmas of a diffusers FlowMatchEulerDiscreteScheduler, from its config.

        A `shift` above 1 increases all sigmas (SD3, arXiv 2403.03206, section 5.3.2). With dynamic
        shifting, diffusers shifts in set_timesteps only, so the training sigmas are unshifted.
        """
        count = config.get("num_train_timesteps", 1000)
        shift = 1.0 if config.get("use_dynamic_shifting") else config.get("shift", 1.0)
        even = np.linspace(1, count, count, dtype=np.float32) / np.float32(count)
        return cls(shift * even / (1 + (shift - 1) * even))

    def __len__(self) -> int:
        return len(self.sigmas)

    def shifted(self, shift: ResolutionShift, height: int, width: int) -> FlowSchedule:
        """The schedule with sigmas shifted as for sampling latents [C, height, width]."""
        return FlowSchedule(shift.shifted(self.sigmas, shift.mu(height, width)))

    def timesteps(self, levels: Levels) -> Array:
        """The denoiser's timesteps [B] f32: T sigma."""
        return self.sigmas[levels] * np.float32(len(self))

    def add_noise(self, latents: Array, noise: Array, levels: Levels) -> Array:
        """z_t = (1 - sigma) z + sigma eps; all [B, C, h, w] f32, levels [B]."""
        sigma = self.sigmas[levels][:, None, None, None]
        return (1 - sigma) * latents + sigma * noise

    def target(self, latents: Array, noise: Array, levels: Levels) -> Array:
        """The velocity eps - z [B, C, h, w] f32, the same at every level (arXiv 2209.03003)."""
        return noise - latents


Schedule = NoiseSchedule | FlowSchedule


def schedule_facts(schedule: Schedule) -> dict[str, Any]:
    """A schedule as JSON. Equal results mean equal noise levels and equal targets."""
    return {name: np.asarray(fact).tolist() for name, fact in vars(schedule).items()}


def is_flow(config: Mapping[str, Any]) -> bool:
    """Whether a diffusers scheduler's config is for flow matching."""
    return str(config.get("_class_name", "")).startswith("FlowMatch")


def schedule_of(config: Mapping[str, Any]) -> Schedule:
    """The noise schedule of a diffusers scheduler's config.

    Raises:
        WrongInput, ValueError, TypeError, OverflowError: the schedule is unknown, or a setting is
            invalid.
    """
    count = config.get("num_train_timesteps", 1000)
    if type(count) is not int or not 0 < count <= MOST_TIMESTEPS:
        raise WrongInput(f"num_train_timesteps is {count!r}, not 1 to {MOST_TIMESTEPS:,}")
    with np.errstate(all="ignore"):
        schedule = _schedule_of(config)
    table = schedule.sigmas if isinstance(schedule, FlowSchedule) else schedule.alphas_cumprod
    if not ((table >= 0) & (table <= 1 + 1e-6)).all():
        raise WrongInput("the scheduler's settings give noise levels outside of 0 to 1")
    return schedule


def _schedule_of(config: Mapping[str, Any]) -> Schedule:
    if is_flow(config):
        return FlowSchedule.from_config(config)
    if config.get("beta_schedule") is None and config.get("trained_betas") is None:
        name = config.get("_class_name", "without a class")
        raise WrongInput(f"the scheduler {name} is not known here: it has no beta_schedule")
    return NoiseSchedule.from_config(config)


def _betas(config: Mapping[str, Any]) -> Array:
    """beta_t [T] f32, with the formulas of diffusers' schedulers."""
    if config.get("trained_betas") is not None:
        betas = np.asarray(config["trained_betas"], np.float32)
        if betas.ndim != 1 or not len(betas):
            raise WrongInput("the scheduler's trained_betas are no list of numbers")
        return betas
    count, kind = config.get("num_train_timesteps", 1000), config.get("beta_schedule", "linear")
    first, last = config.get("beta_start", 0.0001), config.get("beta_end", 0.02)
    if kind == "linear":
        return _linspace(first, last, count)
    if kind == "scaled_linear":  # latent diffusion (arXiv 2112.10752): linear in sqrt(beta)
        return _linspace(first**0.5, last**0.5, count) ** 2
    if kind == "squaredcos_cap_v2":  # improved DDPM (arXiv 2102.09672), equation 17
        at = (np.arange(count + 1) / count + 0.008) / 1.008
        bar = np.cos(at * np.pi / 2) ** 2
        return np.minimum(1 - bar[1:] / bar[:-1], 0.999).astype(np.float32)
    known = "linear, scaled_linear, squaredcos_cap_v2"
    raise WrongInput(f"the scheduler's beta_schedule {kind!r} is not known (known: {known})")


def _linspace(first: float, last: float, count: int) -> Array:
    """torch.linspace in float32, bit for bit: PyTorch computes each half from its own end."""
    steps = np.arange(count)
    low, high = np.float32(first), np.float32(last)
    by = np.float64((high - low) / np.float32(count - 1))
    rising, falling = low + by * steps, high - by * (count - 1 - steps)
    return np.where(steps < count // 2, rising, falling).astype(np.float32)


def _cumprod(betas: Array) -> Array:
    return np.cumprod((np.float32(1) - betas).astype(np.float64)).astype(np.float32)


def rescale_zero_terminal_snr(betas: Array) -> Array:
    """beta_t [T] f32 such that the last alpha_t is 0, by shifting and scaling sqrt(alphas_cumprod).

    arXiv 2305.08891, algorithm 1. The conversion to betas and back rounds; it is kept because
    diffusers has it, and models are trained with the rounded values.
    """
    alpha = np.sqrt(_cumprod(betas))
    first, last = alpha[0], alpha[-1]
    alpha = (alpha - last) * (first / (first - last))
    bar = alpha * alpha
    return (1 - np.append(bar[:1], bar[1:] / bar[:-1])).astype(np.float32)
