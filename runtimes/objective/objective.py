"""The training objective: latents, noise, timesteps, targets and loss weights of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.training import TimestepSampling, Train
from runtimes.contract import WrongInput
from runtimes.objective.noise_schedule import Levels, NoiseSchedule, Schedule
from runtimes.objective.random import Stream, generators
from runtimes.objective.timesteps import Probabilities, level_at, level_bounds
from runtimes.objective.weighting import FlowWeighting, loss_weight

Array = NDArray[np.float32]


@dataclass(frozen=True)
class LatentScale:
    """Scale and shift from the VAE's latents to the denoiser's latents."""

    scaling_factor: float
    shift_factor: float = 0.0
    mean: Sequence[float] | None = None  # [C], latents_mean and latents_std in diffusers
    std: Sequence[float] | None = None

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> LatentScale:
        """From the content of an encode artifact's latents.json, or a VAE's config."""
        return cls(
            info["scaling_factor"],
            info.get("shift_factor") or 0.0,
            info.get("latents_mean"),
            info.get("latents_std"),
        )

    def sample(self, mean: Array, logvar: Array, eps: Array) -> Array:
        """Scaled posterior sample z = (mean + exp(logvar / 2) eps - shift) * scale [B, C, h, w].

        The log-variance is clipped to [-30, 20], as in diffusers' DiagonalGaussianDistribution.
        """
        return self.scaled(mean + np.exp(np.float32(0.5) * np.clip(logvar, -30, 20)) * eps)

    def scaled(self, z: Array) -> Array:
        """The denoiser's latents [B, C, h, w] f32 from the VAE's latents `z`."""
        if self.mean is not None and self.std is not None:
            center, spread = (np.array(x, np.float32)[:, None, None] for x in (self.mean, self.std))
            return (z - center) / spread * np.float32(self.scaling_factor)
        return (z - np.float32(self.shift_factor)) * np.float32(self.scaling_factor)


@dataclass(frozen=True)
class Choices:
    """The random choices for one sample, besides its noise."""

    level: int  # noise level, from 0 (least noise)
    caption: float  # uniform in [0, 1), selects one of the captions
    dropped: bool  # whether the empty caption replaces the caption
    flip: float  # uniform in [0, 1), below 0.5: use the mirrored image, if stored
    mask: float  # uniform in [0, 1), selects one of the masks


@dataclass(frozen=True)
class NoisedBatch:
    """The arrays of a batch that depend on noise. StepBatch has the shapes and dtypes."""

    noisy_latents: Array
    timesteps: NDArray[np.int32] | Array
    target: Array
    weight: Array


@dataclass(frozen=True)
class Objective:
    """The training objective. Its random numbers depend on (seed, sample counter) alone.

    Raises:
        WrongInput: settings that contradict the schedule or one another.
    """

    schedule: Schedule
    scale: LatentScale
    seed: int
    snr_gamma: float | None = None
    debiased_estimation_loss: bool = False
    weighting_scheme: FlowWeighting = "none"
    noise_offset: float = 0.0
    input_perturbation: float = 0.0
    sampling: TimestepSampling = field(default_factory=TimestepSampling)
    caption_dropout_rate: float = 0.0
    _bounds: Probabilities | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.schedule, NoiseSchedule):
            self._check_diffusion(self.schedule)
        else:
            self._check_flow()
        bounds = level_bounds(self.sampling, len(self.schedule))
        object.__setattr__(self, "_bounds", bounds)

    def _check_flow(self) -> None:
        for name in ("snr_gamma", "debiased_estimation_loss"):
            if getattr(self, name):
                raise WrongInput(
                    f"train.{name} weighs diffusion by its SNR, and the base is a flow: use "
                    "train.weighting_scheme"
                )

    def _check_diffusion(self, schedule: NoiseSchedule) -> None:
        if self.weighting_scheme != "none":
            raise WrongInput(
                f"train.weighting_scheme: {self.weighting_scheme} is for flow matching, and the "
                "base's scheduler is for diffusion: use train.snr_gamma or "
                "train.debiased_estimation_loss"
            )
        if schedule.prediction_type == "epsilon" and schedule.alphas_cumprod[-1] == 0:
            raise WrongInput(
                "prediction_type epsilon cannot go with zero terminal SNR (train.zero_terminal_snr "
                "or the scheduler's rescale_betas_zero_snr): at the noisiest level the input "
                "equals epsilon, a trivial prediction; set train.prediction_type to v_prediction"
            )

    @classmethod
    def of(cls, settings: Train, schedule: Schedule, scale: LatentScale) -> Objective:
        """The objective of train settings. Raises WrongInput for contradictory settings."""
        return cls(
            schedule=schedule,
            scale=scale,
            seed=settings.seed,
            snr_gamma=settings.snr_gamma,
            debiased_estimation_loss=settings.debiased_estimation_loss,
            weighting_scheme=settings.weighting_scheme,
            noise_offset=settings.noise_offset,
            input_perturbation=settings.input_perturbation,
            sampling=settings.timesteps,
            caption_dropout_rate=settings.caption_dropout_rate,
        )

    def held_out(self, seed: int) -> Objective:
        """The objective for measurement: uniform timesteps, no caption dropout, no loss weights."""
        return Objective(self.schedule, self.scale, seed, noise_offset=self.noise_offset)

    def choices(self, counters: Sequence[int]) -> list[Choices]:
        """Noise level, caption, dropout, flip and mask for each sample counter."""
        drawn = (rng.random(5) for rng in generators(self.seed, Stream.CHOICES, counters))
        return [self._choices(*uniforms.tolist()) for uniforms in drawn]

    def _choices(
        self, level: float, caption: float, dropout: float, flip: float, mask: float
    ) -> Choices:
        count, bounds = len(self.schedule), self._bounds
        chosen = int(level * count) if bounds is None else level_at(level, bounds)
        return Choices(chosen, caption, dropout < self.caption_dropout_rate, flip, mask)

    def noise(self, counters: Sequence[int], shape: tuple[int, ...]) -> Array:
        """eps [B, C, h, w] f32, with a random shift per channel for a noise offset.

        N. Guttenberg, "Diffusion with offset noise", 2023.

        Args:
            counters: B sample counters.
            shape: (C, h, w).
        """
        noise = self._normal(Stream.NOISE, counters, shape)
        if self.noise_offset:
            shift = self._normal(Stream.NOISE_OFFSET, counters, (shape[0], 1, 1))
            noise = noise + np.float32(self.noise_offset) * shift
        return noise

    def noised(
        self, mean: Array, logvar: Array, levels: Levels, counters: Sequence[int]
    ) -> NoisedBatch:
        """Draw latents and noise, and compute the arrays of a batch.

        Args:
            mean: VAE posterior mean [B, C, h, w].
            logvar: VAE posterior log-variance [B, C, h, w].
            levels: noise levels [B].
            counters: B sample counters.
        """
        shape = mean.shape[1:]
        eps = self._normal(Stream.POSTERIOR, counters, shape)
        latents = self.scale.sample(mean, logvar, eps)
        noise = self.noise(counters, shape)
        perturbed = self._perturbed(noise, counters)
        return NoisedBatch(
            self.schedule.add_noise(latents, perturbed, levels),
            self.schedule.timesteps(levels),
            self.schedule.target(latents, noise, levels),
            self.weight(levels),
        )

    def weight(self, levels: Levels) -> Array:
        """Loss weight per sample [B] f32."""
        return loss_weight(
            self.schedule,
            levels,
            snr_gamma=self.snr_gamma,
            debiased_estimation_loss=self.debiased_estimation_loss,
            weighting_scheme=self.weighting_scheme,
        )

    def _perturbed(self, noise: Array, counters: Sequence[int]) -> Array:
        """The perturbed noise of the model's input; the target has `noise` (arXiv 2301.11706)."""
        if not self.input_perturbation:
            return noise
        more = self._normal(Stream.INPUT_PERTURBATION, counters, noise.shape[1:])
        return noise + np.float32(self.input_perturbation) * more

    def _normal(self, stream: Stream, counters: Sequence[int], shape: tuple[int, ...]) -> Array:
        drawn = np.empty((len(counters), *shape), np.float32)
        for row, rng in zip(drawn, generators(self.seed, stream, counters), strict=True):
            rng.standard_normal(out=row, dtype=np.float32)
        return drawn
