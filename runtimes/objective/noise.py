"""How noise is added at each timestep: by diffusion, or along the straight paths of a flow.

Both schedules are tables over T levels of noise, from the least noisy to the noisiest. A `level` is
a row of the table; what the denoiser is told of it is its `timestep`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtimes.contract import WrongInput

Array = NDArray[np.float32]
Levels = NDArray[np.int32]

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
        """From a diffusers scheduler's config. Raises WrongInput for a schedule unknown here."""
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
        """The level's number [B]."""
        return levels.astype(np.int32)

    def coefficients(self, levels: Levels) -> tuple[Array, Array]:
        """alpha_t and sigma_t, each [B, 1, 1, 1]."""
        a2 = self.alphas_cumprod[levels][:, None, None, None]
        return np.sqrt(a2), np.sqrt(1 - a2)

    def add_noise(self, latents: Array, noise: Array, levels: Levels) -> Array:
        """z_t = alpha_t z + sigma_t eps."""
        alpha, sigma = self.coefficients(levels)
        return alpha * latents + sigma * noise

    def target(self, latents: Array, noise: Array, levels: Levels) -> Array:
        """What the denoiser is to predict [B, C, h, w]: eps, z or v.

        v = alpha_t eps - sigma_t z (progressive distillation, arXiv 2202.00512, appendix D).
        """
        if self.prediction_type == "epsilon":
            return noise
        if self.prediction_type == "sample":
            return latents
        alpha, sigma = self.coefficients(levels)
        return alpha * noise - sigma * latents

    def snr(self, levels: Levels) -> Array:
        """SNR(t) [B]."""
        a2 = self.alphas_cumprod[levels]
        return a2 / (1 - a2)


@dataclass(frozen=True)
class FlowSchedule:
    """The straight paths z_t = (1 - sigma) z + sigma eps (rectified flow, arXiv 2209.03003)."""

    sigmas: Array  # [T], rising to 1
    prediction_type: str = FLOW

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FlowSchedule:
        """From the config of a diffusers FlowMatchEulerDiscreteScheduler: its table for training.

        `shift` moves all levels towards noise (SD3, arXiv 2403.03206, section 5.3.2).
        """
        count = config.get("num_train_timesteps", 1000)
        shift = 1.0 if config.get("use_dynamic_shifting") else config.get("shift", 1.0)
        even = np.linspace(1, count, count, dtype=np.float32) / np.float32(count)
        return cls(shift * even / (1 + (shift - 1) * even))

    def __len__(self) -> int:
        return len(self.sigmas)

    def timesteps(self, levels: Levels) -> Array:
        """T sigma [B]."""
        return self.sigmas[levels] * np.float32(len(self))

    def add_noise(self, latents: Array, noise: Array, levels: Levels) -> Array:
        """z_t = (1 - sigma) z + sigma eps."""
        sigma = self.sigmas[levels][:, None, None, None]
        return (1 - sigma) * latents + sigma * noise

    def target(self, latents: Array, noise: Array, levels: Levels) -> Array:
        """The path's direction eps - z, the same at every level [B, C, h, w]."""
        return noise - latents


Schedule = NoiseSchedule | FlowSchedule


def schedule_facts(schedule: Schedule) -> dict[str, Any]:
    """A schedule as JSON: equal ones add the same noise and ask for the same prediction."""
    return {name: np.asarray(fact).tolist() for name, fact in vars(schedule).items()}


def is_flow(config: Mapping[str, Any]) -> bool:
    """Whether a diffusers scheduler's config is of a flow."""
    return str(config.get("_class_name", "")).startswith("FlowMatch")


def schedule_of(config: Mapping[str, Any]) -> Schedule:
    """The schedule that a diffusers scheduler's config stands for. Raises WrongInput."""
    if is_flow(config):
        return FlowSchedule.from_config(config)
    if config.get("beta_schedule") is None and config.get("trained_betas") is None:
        name = config.get("_class_name", "without a class")
        raise WrongInput(f"the scheduler {name} is not known here: it has no beta_schedule")
    return NoiseSchedule.from_config(config)


def _betas(config: Mapping[str, Any]) -> Array:
    """beta_t [T] in float32, computed as diffusers' schedulers do."""
    if config.get("trained_betas") is not None:
        return np.asarray(config["trained_betas"], np.float32)
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
    """torch.linspace in float32, to the last bit: from both ends towards the middle."""
    steps = np.arange(count)
    low, high = np.float32(first), np.float32(last)
    by = np.float64((high - low) / np.float32(count - 1))
    rising, falling = low + by * steps, high - by * (count - 1 - steps)
    return np.where(steps < count // 2, rising, falling).astype(np.float32)


def _cumprod(betas: Array) -> Array:
    return np.cumprod((np.float32(1) - betas).astype(np.float64)).astype(np.float32)


def rescale_zero_terminal_snr(betas: Array) -> Array:
    """beta_t [T] with alpha_t shifted and stretched so that the last is 0.

    arXiv 2305.08891, algorithm 1, by way of betas as in diffusers: the detour rounds, and a model
    was trained with what it gives.
    """
    alpha = np.sqrt(_cumprod(betas))
    first, last = alpha[0], alpha[-1]
    alpha = (alpha - last) * (first / (first - last))
    bar = alpha * alpha
    return (1 - np.append(bar[:1], bar[1:] / bar[:-1])).astype(np.float32)
