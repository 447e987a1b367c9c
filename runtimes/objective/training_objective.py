"""The training objective: latents, noise, timesteps, targets and loss weights of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from configs.settings.train import Train
from configs.settings.train_parts import TimestepSampling
from runtimes.contract import WrongInput
from runtimes.objective.counter_based_random import Stream
from runtimes.objective.draw_noise_timesteps_and_captions import (
    Choices,
    draw_choices,
    draw_noise,
    draw_normal,
    perturb,
)
from runtimes.objective.loss_weights import FlowWeighting, loss_weight
from runtimes.objective.noise_schedule import (
    FlowSchedule,
    Levels,
    NoiseSchedule,
    Schedule,
)
from runtimes.objective.resolution_shift import ResolutionShift
from runtimes.objective.sample_and_scale_latents import LatentScale
from runtimes.objective.timestep_probabilities import Probabilities, level_bounds

Array = NDArray[np.float32]


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
    resolution_shift: ResolutionShift | None = None  # of a flow
    caption_dropout_rate: float = 0.0
    #: Replace random noise levels: the middles of so many equal bands, by turns of the counter.
    equidistant_levels: int | None = None
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
    def of(
        cls,
        settings: Train,
        schedule: Schedule,
        scale: LatentScale,
        resolution_shift: ResolutionShift | None = None,
    ) -> Objective:
        """The objective of train settings.

        Args:
            resolution_shift: of the base's scheduler, if it has one.

        Raises:
            WrongInput: the settings contradict each other or the schedule.
        """
        shifts = settings.timesteps.resolution_shift
        if shifts and resolution_shift is None:
            raise WrongInput(
                "train.timesteps.resolution_shift: the base's scheduler has no "
                "use_dynamic_shifting: set false"
            )
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
            resolution_shift=resolution_shift if shifts else None,
            caption_dropout_rate=settings.caption_dropout_rate,
        )

    def held_out(self, seed: int) -> Objective:
        """The objective for measurement: uniform timesteps, no caption dropout, no loss weights."""
        return Objective(self.schedule, self.scale, seed, noise_offset=self.noise_offset)

    def choices(self, counters: Sequence[int]) -> list[Choices]:
        """The random choices for the samples at `counters`."""
        levels, bands = len(self.schedule), self.equidistant_levels
        found = draw_choices(self.seed, counters, levels, self._bounds, self.caption_dropout_rate)
        if bands is None:
            return found
        middles = [(2 * (counter % bands) + 1) * levels // (2 * bands) for counter in counters]
        return [replace(one, level=level) for one, level in zip(found, middles, strict=True)]

    def noise(self, counters: Sequence[int], shape: tuple[int, ...]) -> Array:
        """eps [B, C, h, w] f32 of the samples at `counters`; shape is (C, h, w)."""
        return draw_noise(self.seed, counters, shape, self.noise_offset)

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
        shape, schedule = mean.shape[1:], self._schedule_for(*mean.shape[-2:])
        eps = draw_normal(self.seed, Stream.POSTERIOR, counters, shape)
        latents = self.scale.sample(mean, logvar, eps)
        noise = self.noise(counters, shape)
        perturbed = perturb(self.seed, counters, noise, self.input_perturbation)
        return NoisedBatch(
            schedule.add_noise(latents, perturbed, levels),
            schedule.timesteps(levels),
            schedule.target(latents, noise, levels),
            self.weight(levels, schedule),
        )

    def _schedule_for(self, height: int, width: int) -> Schedule:
        """The schedule of latents [C, height, width]."""
        if self.resolution_shift is None or not isinstance(self.schedule, FlowSchedule):
            return self.schedule
        return self.schedule.shifted(self.resolution_shift, height, width)

    def weight(self, levels: Levels, schedule: Schedule) -> Array:
        """Loss weight per sample [B] f32 at noise levels [B] of a schedule."""
        return loss_weight(
            schedule,
            levels,
            snr_gamma=self.snr_gamma,
            debiased_estimation_loss=self.debiased_estimation_loss,
            weighting_scheme=self.weighting_scheme,
        )
