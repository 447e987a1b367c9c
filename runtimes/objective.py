"""What the model is trained to predict: noise, timesteps, targets and loss weights, in NumPy.

Notation: alpha_t^2 = alphas_cumprod[t], sigma_t^2 = 1 - alpha_t^2, SNR(t) = alpha_t^2 / sigma_t^2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtimes.base import WrongInput
from runtimes.draws import Stream, generator

Array = NDArray[np.float32]


@dataclass(frozen=True)
class NoiseSchedule:
    """The forward process q(z_t | z) = N(alpha_t z, sigma_t^2) (DDPM, arXiv 2006.11239)."""

    alphas_cumprod: Array  # [T]
    prediction_type: str

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> NoiseSchedule:
        """From a diffusers scheduler's config. Raises WrongInput for a schedule unknown here."""
        betas = _betas(config)
        if config.get("rescale_betas_zero_snr"):
            betas = rescale_zero_terminal_snr(betas)
        alphas_cumprod = _cumprod(betas)
        return cls(alphas_cumprod, config.get("prediction_type", "epsilon"))

    def __len__(self) -> int:
        return len(self.alphas_cumprod)

    def coefficients(self, timesteps: NDArray[np.int32]) -> tuple[Array, Array]:
        """alpha_t and sigma_t, each [B, 1, 1, 1]."""
        a2 = self.alphas_cumprod[timesteps][:, None, None, None]
        return np.sqrt(a2), np.sqrt(1 - a2)

    def add_noise(self, latents: Array, noise: Array, timesteps: NDArray[np.int32]) -> Array:
        """z_t = alpha_t z + sigma_t eps."""
        alpha, sigma = self.coefficients(timesteps)
        return alpha * latents + sigma * noise

    def velocity(self, latents: Array, noise: Array, timesteps: NDArray[np.int32]) -> Array:
        """v = alpha_t eps - sigma_t z (progressive distillation, arXiv 2202.00512, appendix D)."""
        alpha, sigma = self.coefficients(timesteps)
        return alpha * noise - sigma * latents

    def snr(self, timesteps: NDArray[np.int32]) -> Array:
        """SNR(t) [B]."""
        a2 = self.alphas_cumprod[timesteps]
        return a2 / (1 - a2)


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


def min_snr_weight(snr: Array, gamma: float, prediction_type: str) -> Array:
    """Min-SNR-gamma loss weights [B] (arXiv 2303.09556), each sample's by its own SNR.

    min(SNR, gamma) over SNR for epsilon, over SNR + 1 for v-prediction; both finite at SNR 0.
    """
    if prediction_type == "v_prediction":
        return np.divide(np.minimum(snr, np.float32(gamma)), snr + 1, dtype=np.float32)
    with np.errstate(divide="ignore"):
        return np.minimum(np.float32(1), np.float32(gamma) / snr)


@dataclass(frozen=True)
class LatentScale:
    """From the VAE's raw moments to the UNet's latents."""

    scaling_factor: float
    shift_factor: float = 0.0
    mean: Sequence[float] | None = None  # per channel; as diffusers' latents_mean, latents_std
    std: Sequence[float] | None = None

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> LatentScale:
        """From an encode artifact's latents.json."""
        return cls(
            info["scaling_factor"],
            info.get("shift_factor") or 0.0,
            info.get("latents_mean"),
            info.get("latents_std"),
        )

    def sample(self, mean: Array, logvar: Array, eps: Array) -> Array:
        """z = (mean + exp(logvar / 2) eps - shift) * scale; all [B, C, h, w].

        The log-variance is clipped to [-30, 20], as diffusers' DiagonalGaussianDistribution does.
        """
        z = mean + np.exp(np.float32(0.5) * np.clip(logvar, -30, 20)) * eps
        if self.mean is not None and self.std is not None:
            center, spread = (np.array(x, np.float32)[:, None, None] for x in (self.mean, self.std))
            return (z - center) / spread * np.float32(self.scaling_factor)
        return (z - np.float32(self.shift_factor)) * np.float32(self.scaling_factor)


@dataclass(frozen=True)
class Choices:
    """What is drawn for one sample besides its noise."""

    timestep: int
    caption: float  # uniform in [0, 1): which of its captions
    dropped: bool  # train it without a caption


@dataclass(frozen=True)
class Noised:
    """A batch ready for the model: see StepBatch for the shapes."""

    noisy_latents: Array
    target: Array
    weight: Array


@dataclass(frozen=True)
class Objective:
    """The training objective: everything random in it is keyed on (seed, sample counter)."""

    schedule: NoiseSchedule
    scale: LatentScale
    seed: int
    prediction_type: str | None = None  # None takes the schedule's word
    snr_gamma: float | None = None
    noise_offset: float = 0.0
    caption_dropout: float = 0.0

    def __post_init__(self) -> None:
        kind = self.prediction_type or self.schedule.prediction_type
        if kind not in ("epsilon", "v_prediction"):
            raise WrongInput(f"prediction_type {kind!r} is not known (epsilon, v_prediction)")
        if kind == "epsilon" and self.schedule.alphas_cumprod[-1] == 0:
            raise WrongInput(
                "prediction_type epsilon cannot go with a scheduler of zero terminal SNR "
                "(rescale_betas_zero_snr): at its last step noise says nothing about the picture; "
                "set train.prediction_type to v_prediction"
            )
        object.__setattr__(self, "prediction_type", kind)

    def choices(self, counter: int) -> Choices:
        """Timestep (uniform), caption and dropout of the sample at `counter`."""
        timestep, caption, dropout = generator(self.seed, Stream.CHOICES, counter).random(3)
        return Choices(
            int(timestep * len(self.schedule)), float(caption), bool(dropout < self.caption_dropout)
        )

    def noise(self, counters: Sequence[int], shape: tuple[int, ...]) -> Array:
        """eps [B, C, h, w], with a shift per channel if there is a noise offset.

        Noise offset: N. Guttenberg, "Diffusion with offset noise", 2023.
        """
        noise = self._normal(Stream.NOISE, counters, shape)
        if self.noise_offset:
            shift = self._normal(Stream.NOISE_OFFSET, counters, (shape[0], 1, 1))
            noise = noise + np.float32(self.noise_offset) * shift
        return noise

    def noised(
        self, mean: Array, logvar: Array, timesteps: NDArray[np.int32], counters: Sequence[int]
    ) -> Noised:
        """Draw latents and noise for VAE moments [B, C, h, w] of the samples at `counters`."""
        shape = mean.shape[1:]
        eps = self._normal(Stream.POSTERIOR, counters, shape)
        latents = self.scale.sample(mean, logvar, eps)
        noise = self.noise(counters, shape)
        is_velocity = self.prediction_type == "v_prediction"
        target = self.schedule.velocity(latents, noise, timesteps) if is_velocity else noise
        return Noised(
            self.schedule.add_noise(latents, noise, timesteps), target, self.weight(timesteps)
        )

    def weight(self, timesteps: NDArray[np.int32]) -> Array:
        """Loss weight of each sample [B]."""
        if self.snr_gamma is None:
            return np.ones(len(timesteps), np.float32)
        with np.errstate(divide="ignore"):
            snr = self.schedule.snr(timesteps)
        return min_snr_weight(snr, self.snr_gamma, str(self.prediction_type))

    def _normal(self, stream: Stream, counters: Sequence[int], shape: tuple[int, ...]) -> Array:
        drawn = np.empty((len(counters), *shape), np.float32)
        for row, counter in zip(drawn, counters, strict=True):
            generator(self.seed, stream, counter).standard_normal(out=row, dtype=np.float32)
        return drawn
